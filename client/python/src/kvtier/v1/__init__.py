"""Messages of the wire, generated from proto/kvtier/v1 by `make proto-python`."""
