"""Calls as the official Python classes make them."""
import grpc
import protos

OK, OVER_LIMIT = 1, 2


def asker(channel):
    """What calls over this channel: `ask(request, timeout)`."""
    return channel.unary_unary(protos.METHOD, request_serializer=lambda message: message.SerializeToString(),
                               response_deserializer=protos.Response.FromString)


def channel_over_tls(tollgate, server_name, authority, shown=None):
    """For a server of this name that this authority knows; with the files of the client's own certificate, if it has one."""
    pair = [shown[name].encode() for name in ("tls.key", "tls.crt")] if shown else []
    credentials = grpc.ssl_channel_credentials(authority.pem.encode(), *pair)
    return grpc.secure_channel(f"127.0.0.1:{tollgate.grpc}", credentials, [("grpc.ssl_target_name_override", server_name)])


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
