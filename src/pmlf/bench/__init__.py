"""Side by side: what a private gradient costs in time and memory, against a plain one and against other ways to it."""
