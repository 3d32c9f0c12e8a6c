"""What was spent and how it is shown: ledger, budget, certificate."""
