"""What cannot be private, found before or while a model trains."""
