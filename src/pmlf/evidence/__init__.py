"""Evidence of what training spends: the ledger, the budget that stops a run, and the certificate."""
