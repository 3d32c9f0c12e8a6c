"""The paper's tables and figures as lists of runs, what runs them, and the report about them."""
