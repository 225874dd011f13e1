"""Messages that become jobs: streams of Redis and Valkey (the extra `redis`), queues of RabbitMQ (the extra `amqp`)."""

from dataloader.flows.messages.amqp_message import AmqpMessage
from dataloader.flows.messages.amqp_messages import AmqpMessages
from dataloader.flows.messages.messages import Message, Messages

__all__ = ["AmqpMessage", "AmqpMessages", "Message", "Messages"]
