"""Calls as the official Python classes make them."""
import grpc
import protos

OK, OVER_LIMIT = 1, 2


def asker(channel):
    """What calls over this channel: `ask(request, timeout)`."""
    return channel.unary_unary(protos.METHOD, request_serializer=lambda message: message.SerializeToString(),
                               response_deserializer=protos.Response.FromString)


def call(tollgate, request, timeout=5):
    with grpc.insecure_channel(f"127.0.0.1:{tollgate.grpc}") as channel:
        return asker(channel)(request, timeout=timeout)


def request(*descriptors, domain="lab", hits_addend=0):
    message = protos.Request(domain=domain, hits_addend=hits_addend)
    for entries in descriptors:
        descriptor = message.descriptors.add()
        for key, value in entries.items():
            descriptor.entries.add(key=key, value=value)
    return message
