"""The `solo-ext demo` command: a few minutes of pretraining on digits, with a report."""
