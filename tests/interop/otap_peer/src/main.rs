//! The published OTAP encoder and decoder as a filter: frames on stdin, frames on stdout, each a u32 of its
//! length (little-endian) and its bytes.
//!
//!   otap-peer encode traces|logs|metrics [zstd|lz4|none]    OTLP requests in, BatchArrowRecords of one stream out
//!   otap-peer decode traces|logs|metrics                    the other way round

use std::env::args;
use std::io::{stdin, stdout, Read, Write};

use arrow_ipc::CompressionType;
use otel_arrow_dfe_config::SignalType;
use otel_arrow_dfe_pdata::encode::producer::ProducerOptions;
use otel_arrow_dfe_pdata::proto::opentelemetry::arrow::v1::BatchArrowRecords;
use otel_arrow_dfe_pdata::{
    Consumer, OtapArrowRecords, OtlpProtoBytes, Producer, TryFromWithOptions,
};
use prost::Message;

fn frames() -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let _ = stdin().read_to_end(&mut all).expect("stdin");
    let mut rest = &all[..];
    let mut found = Vec::new();
    while rest.len() >= 4 {
        let length = u32::from_le_bytes(rest[..4].try_into().expect("four bytes")) as usize;
        found.push(rest[4..4 + length].to_vec());
        rest = &rest[4 + length..];
    }
    found
}

fn write(frame: &[u8]) {
    let mut out = stdout().lock();
    out.write_all(&(frame.len() as u32).to_le_bytes()).expect("stdout");
    out.write_all(frame).expect("stdout");
}

fn encode(signal: SignalType, codec: Option<CompressionType>) {
    let mut producer = Producer::new_with_options(ProducerOptions { ipc_compression: codec });
    for frame in frames() {
        let otlp = OtlpProtoBytes::new_from_bytes(signal, frame);
        let mut records = OtapArrowRecords::try_from_with_default(otlp).expect("OTLP to OTAP");
        let batch = producer.produce_bar(&mut records).expect("a batch");
        write(&batch.encode_to_vec());
    }
}

fn decode(signal: SignalType) {
    let mut consumer = Consumer::default();
    for frame in frames() {
        let mut batch = BatchArrowRecords::decode(&frame[..]).expect("a batch");
        let request = match signal {
            SignalType::Traces => consumer.consume_traces_batches(&mut batch).map(|m| m.encode_to_vec()),
            SignalType::Logs => consumer.consume_logs_batches(&mut batch).map(|m| m.encode_to_vec()),
            SignalType::Metrics => consumer.consume_metrics_batches(&mut batch).map(|m| m.encode_to_vec()),
        };
        write(&request.expect("OTAP to OTLP"));
    }
}

fn main() {
    let words: Vec<String> = args().collect();
    let signal = match words[2].as_str() {
        "traces" => SignalType::Traces,
        "logs" => SignalType::Logs,
        "metrics" => SignalType::Metrics,
        other => panic!("{other} is no signal"),
    };
    let codec = match words.get(3).map(String::as_str) {
        Some("none") => None,
        Some("lz4") => Some(CompressionType::LZ4_FRAME),
        _ => Some(CompressionType::ZSTD),
    };
    match words[1].as_str() {
        "encode" => encode(signal, codec),
        "decode" => decode(signal),
        other => panic!("{other} is no command"),
    }
}
