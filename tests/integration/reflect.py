"""A gRPC client that knows nothing of our messages: it learns them through server reflection.

    with reflect.Client("unix:/run/ep-server/ep.sock") as rpc:
        rpc.call("ep.v1.Admin/ListGroups", {})                       # dict in, dict out (proto3 JSON names)
        for event in rpc.stream("ep.v1.Admin/WatchGroups", {}): ...

This is what grpcurl does, so it also tests that reflection is enough.  Needs python3-grpcio; see MISSING.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

try:
    import grpc
    from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
    MISSING = None
except ImportError as e:
    MISSING = "python3-grpcio and python3-protobuf are needed: %s" % e


def _reflection_file():
    """The part of reflection.proto that is used here."""
    file = descriptor_pb2.FileDescriptorProto(name="ep_test_reflection.proto", package="ep_test", syntax="proto3")
    text, message = descriptor_pb2.FieldDescriptorProto.TYPE_STRING, descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE

    def add(name, *fields):
        entry = file.message_type.add(name=name)
        for number, field, kind, label in fields:
            f = entry.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                f.type, f.type_name = message, ".ep_test." + kind
            else:
                f.type = kind
    one, many = 1, 3
    add("Request", (3, "file_by_filename", text, one), (4, "file_containing_symbol", text, one),
        (7, "list_services", text, one))
    add("File", (1, "file_descriptor_proto", descriptor_pb2.FieldDescriptorProto.TYPE_BYTES, many))
    add("Service", (1, "name", text, one))
    add("Services", (1, "service", "Service", many))
    add("Error", (1, "error_code", descriptor_pb2.FieldDescriptorProto.TYPE_INT32, one), (2, "error_message", text, one))
    add("Reply", (4, "files", "File", one), (6, "services", "Services", one), (7, "error", "Error", one))
    return file


def _read(path):
    with open(path, "rb") as f:
        return f.read()


class Client:
    """One channel.  tls: (ca, cert, key) as paths."""

    def __init__(self, target, timeout=40.0, tls=None, version="v1"):
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        self.timeout = timeout * float(os.environ.get("EP_TIME_SCALE", "1"))
        if tls:
            ca, cert, key = map(_read, tls)
            self.channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options)
        else:
            self.channel = grpc.insecure_channel(target, options)
        self.path = "/grpc.reflection.%s.ServerReflection/ServerReflectionInfo" % version
        self.pool = descriptor_pool.DescriptorPool()
        self.pool.Add(_reflection_file())
        self.files = set()

    def _class(self, name):
        return message_factory.MessageFactory(self.pool).GetPrototype(self.pool.FindMessageTypeByName(name))

    def _ask(self, **question):
        request = self._class("ep_test.Request")
        reply = self._class("ep_test.Reply")
        call = self.channel.stream_stream(self.path, request.SerializeToString, reply.FromString)
        return next(iter(call(iter([request(**question)]), timeout=self.timeout)))

    def services(self):
        return sorted(s.name for s in self._ask(list_services="*").services.service)

    def _learn(self, reply):
        if reply.HasField("error"):
            raise LookupError("reflection: " + reply.error.error_message)
        for data in reply.files.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            if file.name in self.files:
                continue
            self.files.add(file.name)
            for name in file.dependency:
                if name not in self.files:
                    self._learn(self._ask(file_by_filename=name))
            self.pool.Add(file)

    def service(self, name):
        try:
            return self.pool.FindServiceByName(name)
        except KeyError:
            self._learn(self._ask(file_containing_symbol=name))
            return self.pool.FindServiceByName(name)

    def _method(self, path, kind):
        service, method = path.split("/")
        descriptor = self.service(service).methods_by_name[method]
        request, reply = self._class(descriptor.input_type.full_name), self._class(descriptor.output_type.full_name)
        return request, getattr(self.channel, kind)("/" + path, request.SerializeToString, reply.FromString)

    def call(self, path, request=None, timeout=None, wait=False):
        """A unary call; grpc.RpcError says what was wrong."""
        kind, method = self._method(path, "unary_unary")
        reply = method(json_format.ParseDict(request or {}, kind()), timeout=timeout or self.timeout, wait_for_ready=wait)
        return json_format.MessageToDict(reply, preserving_proto_field_name=True)

    def stream(self, path, request=None, timeout=None):
        """Replies one by one; the iterator has .cancel()."""
        kind, method = self._method(path, "unary_stream")
        return _Stream(method(json_format.ParseDict(request or {}, kind()), timeout=timeout or self.timeout))

    def close(self):
        self.channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _Stream:
    def __init__(self, call):
        self.call = call
        self.cancel = call.cancel

    def __iter__(self):
        return self

    def __next__(self):
        return json_format.MessageToDict(next(self.call), preserving_proto_field_name=True)
