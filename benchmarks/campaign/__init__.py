"""Record paired ground truth: models and variants of them, each run in a separate process (docs/campaign.md)."""
