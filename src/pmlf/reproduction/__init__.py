"""The paper's tables and figures as lists of runs, their execution, and the report of the results."""
