"""What methods keep, need and send, by formula; the tables of ``docs/project/memory.md``."""
