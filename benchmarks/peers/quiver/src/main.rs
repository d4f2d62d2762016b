//! The published `otel-arrow-dfe-quiver` crate as a program: a line of JSON in is a turn, a line out its rate.
//!
//! Usage: `quiver-peer DIRECTORY`, then lines such as
//! `{"seconds": 1.0, "rows": 1000, "flush_ms": 0, "producers": 1}`.
//! Each turn has a directory of its own below DIRECTORY, which is removed again. Opening, shutdown and
//! removal are not timed. With `flush_ms` 0 the crate syncs its WAL in every ingest before it returns; with
//! a value above 0 it returns before the sync.

use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use arrow_array::{Int64Array, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema};
use otel_arrow_dfe_quiver::config::{QuiverConfig, WalConfig};
use otel_arrow_dfe_quiver::record_bundle::{
    BundleDescriptor, PayloadRef, RecordBundle, SlotDescriptor, SlotId,
};
use otel_arrow_dfe_quiver::{DiskBudget, QuiverEngine};

type Failure = Box<dyn std::error::Error + Send + Sync>;

struct Bundle {
    descriptor: BundleDescriptor,
    batch: RecordBatch,
}

impl Bundle {
    fn new(rows: i64) -> Result<Self, Failure> {
        let schema = Arc::new(Schema::new(vec![
            Field::new("timestamp", DataType::Int64, true),
            Field::new("value", DataType::Int64, true),
            Field::new("message", DataType::Utf8, true),
        ]));
        let times = Int64Array::from_iter_values((0..rows).map(|row| 1_700_000_000_000 + row));
        let values = Int64Array::from_iter_values((0..rows).map(|row| row * 100));
        let words = (0..rows).map(|row| format!("Log message number {row} with some content"));
        let messages = StringArray::from_iter_values(words);
        let columns: Vec<arrow_array::ArrayRef> = vec![Arc::new(times), Arc::new(values), Arc::new(messages)];
        Ok(Self {
            descriptor: BundleDescriptor::new(vec![SlotDescriptor::new(SlotId(0), "Logs")]),
            batch: RecordBatch::try_new(schema, columns)?,
        })
    }
}

impl RecordBundle for Bundle {
    fn descriptor(&self) -> &BundleDescriptor {
        &self.descriptor
    }

    fn ingestion_time(&self) -> SystemTime {
        SystemTime::now()
    }

    fn payload(&self, slot: SlotId) -> Option<PayloadRef<'_>> {
        (slot == SlotId(0)).then_some(PayloadRef {
            schema_fingerprint: [7; 32],
            batch: &self.batch,
        })
    }
}

/// Ingests per second of `producers` tasks that each wait for the answer before the next batch.
async fn turn(directory: &Path, order: &serde_json::Value) -> Result<f64, Failure> {
    let seconds = order["seconds"].as_f64().ok_or("seconds")?;
    let rows = order["rows"].as_i64().ok_or("rows")?;
    let producers = order["producers"].as_u64().unwrap_or(1);
    let flush = Duration::from_millis(order["flush_ms"].as_u64().unwrap_or(0));
    let config = QuiverConfig::builder()
        .data_dir(directory)
        .wal(WalConfig { flush_interval: flush, ..WalConfig::default() })
        .build()?;
    let engine = QuiverEngine::open(config, Arc::new(DiskBudget::unlimited())).await?;
    let done = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    let end = began + Duration::from_secs_f64(seconds);
    let tasks: Vec<_> = (0..producers)
        .map(|_| {
            let (engine, done) = (engine.clone(), done.clone());
            tokio::spawn(async move {
                let bundle = Bundle::new(rows)?;
                while Instant::now() < end {
                    engine.ingest(&bundle).await?;
                    let _ = done.fetch_add(1, Ordering::Relaxed);
                }
                Ok::<(), Failure>(())
            })
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    let rate = done.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64();
    engine.shutdown().await?;
    Ok(rate)
}

fn main() -> Result<(), Failure> {
    let root = PathBuf::from(std::env::args().nth(1).ok_or("usage: quiver-peer DIRECTORY")?);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    for (number, line) in std::io::stdin().lock().lines().enumerate() {
        let order: serde_json::Value = serde_json::from_str(&line?)?;
        let directory = root.join(format!("turn-{number}"));
        std::fs::create_dir_all(&directory)?;
        let rate = runtime.block_on(turn(&directory, &order))?;
        std::fs::remove_dir_all(&directory)?;
        println!("{}", serde_json::json!({ "rate": rate }));
        std::io::stdout().flush()?;
    }
    Ok(())
}
