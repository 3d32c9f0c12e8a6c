"""What was run, beside what the paper claims: a page, tables and pictures, made from records alone."""
