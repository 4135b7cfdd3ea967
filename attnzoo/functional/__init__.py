"""The functions that users call; they bring variants and backends together."""
