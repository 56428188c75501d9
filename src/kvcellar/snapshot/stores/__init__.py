"""Where snapshots are kept: in memory, on disk, in Redis; one protocol for all."""
