"""The report: results of runs next to the paper's claims, as a page, tables and images, made from records."""
