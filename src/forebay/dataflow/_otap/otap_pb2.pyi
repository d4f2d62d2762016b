from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Batch(_message.Message):
    __slots__ = ("batch_id", "payloads", "headers")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    payloads: _containers.RepeatedCompositeFieldContainer[Payload]
    headers: bytes
    def __init__(self, batch_id: _Optional[int] = ..., payloads: _Optional[_Iterable[_Union[Payload, _Mapping]]] = ..., headers: _Optional[bytes] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("schema_id", "type", "record")
    SCHEMA_ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    schema_id: str
    type: int
    record: bytes
    def __init__(self, schema_id: _Optional[str] = ..., type: _Optional[int] = ..., record: _Optional[bytes] = ...) -> None: ...

class BatchStatus(_message.Message):
    __slots__ = ("batch_id", "status_code", "status_message")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_CODE_FIELD_NUMBER: _ClassVar[int]
    STATUS_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    status_code: int
    status_message: str
    def __init__(self, batch_id: _Optional[int] = ..., status_code: _Optional[int] = ..., status_message: _Optional[str] = ...) -> None: ...
