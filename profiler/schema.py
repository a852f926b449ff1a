"""The store's tables and every statement that it runs."""

from typing import Final

APPLICATION_ID: Final = 0x4D555249
"""“MURI”: tells a store from another program's database."""

MIGRATIONS: Final = (
    (
        """CREATE TABLE measurement (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            model TEXT NOT NULL,
            batch_size INTEGER NOT NULL,
            gpu_count INTEGER NOT NULL,
            gpu_type TEXT NOT NULL,
            load_s REAL NOT NULL,
            preprocess_s REAL NOT NULL,
            propagate_s REAL NOT NULL,
            synchronize_s REAL NOT NULL,
            iteration_s REAL NOT NULL,
            gpu_mem_gib REAL NOT NULL,
            iterations INTEGER NOT NULL,
            measured_at TEXT NOT NULL,
            source TEXT NOT NULL
        )""",
        "CREATE INDEX measurement_key ON measurement (model, batch_size, gpu_count, gpu_type, id)",
    ),
)
"""Statements that lead from each `user_version` to the next; never edited, only added to."""

INSERT: Final = """
    INSERT INTO measurement (
        model, batch_size, gpu_count, gpu_type,
        load_s, preprocess_s, propagate_s, synchronize_s, iteration_s,
        gpu_mem_gib, iterations, measured_at, source
    ) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

NEWEST_OF_ALL: Final = """
    SELECT * FROM measurement
    WHERE id IN (SELECT max(id) FROM measurement GROUP BY model, batch_size, gpu_count, gpu_type)
    ORDER BY model, batch_size, gpu_count, gpu_type
"""

OF_KEY: Final = """
    SELECT * FROM measurement
    WHERE model = ? AND batch_size = ? AND gpu_count = ? AND gpu_type = ?
    ORDER BY id DESC LIMIT ?
"""

COUNT_OF_KEY: Final = """
    SELECT count(*) FROM measurement
    WHERE model = ? AND batch_size = ? AND gpu_count = ? AND gpu_type = ?
"""

DELETE_KEY: Final = """
    DELETE FROM measurement
    WHERE model = ? AND batch_size = ? AND gpu_count = ? AND gpu_type = ?
"""

DELETE_OLD_OF_KEY: Final = """
    DELETE FROM measurement WHERE id IN (
        SELECT id FROM measurement
        WHERE model = ? AND batch_size = ? AND gpu_count = ? AND gpu_type = ?
        ORDER BY id DESC LIMIT -1 OFFSET ?
    )
"""
