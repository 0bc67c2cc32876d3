"""How bytes reach an engine: shared memory of one host (`ipc`), or a collective (`broadcast`)."""
