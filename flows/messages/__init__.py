"""Messages that become jobs: streams of Redis and Valkey (the extra `redis`)."""

from dataloader.flows.messages.messages import Message, Messages

__all__ = ["Message", "Messages"]
