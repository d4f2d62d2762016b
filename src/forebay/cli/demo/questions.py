"""What the demo asks of its tables, in the SQL that Spark and DuckDB both speak. The answers must agree."""

from __future__ import annotations

from typing import Final

__all__ = ["QUESTIONS"]

QUESTIONS: Final = {
    "revenue by country": """
        select country, count(*) as orders, round(sum(amount), 2) as revenue
        from orders group by country order by country
    """,
    "pages by clicks": """
        select page, count(*) as clicks, max(ms) as slowest
        from clicks group by page order by page
    """,
    "readings per day, late ones in days before": """
        select cast(cast(event_time as date) as string) as day, count(*) as readings
        from telemetry group by cast(event_time as date) order by day
    """,
    "customers who ordered and clicked": """
        select count(distinct o.customer) from orders o join clicks c on o.customer = c.customer
    """,
}
"""Name and query."""
