from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

import forebay
from forebay.coordination._oxia import oxia_pb2 as pb

SOURCE_ROOT = Path(forebay.__file__).parents[1]
PROTO = "forebay/coordination/_oxia/oxia.proto"


def test_checked_in_messages_are_those_of_the_proto(tmp_path: Path) -> None:
    """If this fails: make proto."""
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    made = tmp_path / "made"
    assert protoc.main(["protoc", f"--proto_path={SOURCE_ROOT}", f"--descriptor_set_out={made}", PROTO]) == 0
    [described] = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file
    checked_in = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(checked_in)
    for description in (described, checked_in):
        # Names derived for JSON are filled in by one side only.
        for message in description.message_type:
            for field in [*message.field, *[f for nested in message.nested_type for f in nested.field]]:
                field.ClearField("json_name")
    assert described == checked_in


def test_package_is_not_the_servers_so_that_other_clients_can_be_loaded_beside() -> None:
    assert pb.DESCRIPTOR.package == "forebay.coordination.oxia"
