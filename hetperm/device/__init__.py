"""What runs on a device: code that gets a model and a shard, and knows nothing of a server."""
