"""The lab: real training over real sockets between hosts that are network namespaces of this machine (docs/lab.md)."""
