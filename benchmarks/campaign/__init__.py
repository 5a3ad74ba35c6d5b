"""Records paired ground truth: models and variants of them, each run in a process of its own (docs/campaign.md)."""
