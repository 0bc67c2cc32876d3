"""What runs beside the engine's model: trace its loader, take the bytes, load them, commit or poison."""
