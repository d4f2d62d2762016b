"""Orders from a topic: as they are, totals by country, and the large ones into another topic."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.getActiveSession()
where = spark.conf.get("orders.path")

dp.create_sink("large_orders", "forebay", {"path": where, "topic": "large-orders"})


@dp.table(format="parquet")
def orders() -> DataFrame:
    """Every order once, whatever is restarted."""
    topic = spark.readStream.format("forebay").option("path", where).option("subscribe", "orders")
    parsed = f.from_json(f.col("value").cast("string"), "id long, country string, amount double")
    return (
        topic.option("startingOffsets", "earliest")
        .load()
        .select("partition", "offset", "timestamp", parsed.alias("order"))
        .select("partition", "offset", "timestamp", "order.*")
    )


@dp.materialized_view(format="parquet")
def totals() -> DataFrame:
    """What each country has bought."""
    return spark.read.table("orders").groupBy("country").agg(f.sum("amount").alias("amount"))


@dp.append_flow(target="large_orders")
def large() -> DataFrame:
    """Orders above 1,000, back into a topic."""
    return (
        spark.readStream.table("orders")
        .where("amount > 1000")
        .select(f.col("country").alias("key"), f.to_json(f.struct("id", "amount")).alias("value"))
    )
