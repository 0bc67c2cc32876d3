"""The code beside the engine's model: trace its loader, receive bytes, load them, commit or poison."""
