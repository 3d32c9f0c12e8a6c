"""What runs leave behind."""

RUN_FILES = [  # of a finished one, sorted
    "certificate.html",
    "certificate.json",
    "ledger.jsonl",
    "metrics.jsonl",
    "model.json",
    "model.safetensors",
    "result.json",
    "spec.json",
]
