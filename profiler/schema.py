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
    (
        "ALTER TABLE measurement ADD COLUMN detail TEXT NOT NULL DEFAULT '{}'",
        """CREATE TABLE stale (
            model TEXT NOT NULL,
            batch_size INTEGER NOT NULL,
            gpu_count INTEGER NOT NULL,
            gpu_type TEXT NOT NULL,
            since TEXT NOT NULL,
            reason TEXT NOT NULL,
            who TEXT NOT NULL,
            PRIMARY KEY (model, batch_size, gpu_count, gpu_type)
        )""",
        """CREATE TABLE observation (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            model TEXT NOT NULL,
            batch_size INTEGER NOT NULL,
            gpu_count INTEGER NOT NULL,
            gpu_type TEXT NOT NULL,
            observed_at TEXT NOT NULL,
            job_id INTEGER NOT NULL,
            iterations INTEGER NOT NULL,
            stage_s TEXT NOT NULL
        )""",
        "CREATE INDEX observation_key ON observation (model, batch_size, gpu_count, gpu_type, id)",
        """CREATE TABLE audit (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            at TEXT NOT NULL,
            who TEXT NOT NULL,
            action TEXT NOT NULL,
            model TEXT NOT NULL,
            batch_size INTEGER NOT NULL,
            gpu_count INTEGER NOT NULL,
            gpu_type TEXT NOT NULL,
            before TEXT NOT NULL,
            after TEXT NOT NULL
        )""",
        """CREATE TABLE document (
            kind TEXT NOT NULL,
            name TEXT NOT NULL,
            measured_at TEXT NOT NULL,
            body TEXT NOT NULL,
            PRIMARY KEY (kind, name)
        )""",
    ),
)
"""Statements that lead from each `user_version` to the next; never edited, only added to."""

INSERT: Final = """
    INSERT INTO measurement (
        model, batch_size, gpu_count, gpu_type,
        load_s, preprocess_s, propagate_s, synchronize_s, iteration_s,
        gpu_mem_gib, iterations, measured_at, source, detail
    ) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
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

PUT_DOCUMENT: Final = """
    INSERT INTO document (kind, name, measured_at, body) VALUES (?, ?, ?, ?)
    ON CONFLICT (kind, name) DO UPDATE SET measured_at = excluded.measured_at, body = excluded.body
"""

DOCUMENTS_OF_KIND: Final = "SELECT name, measured_at, body FROM document WHERE kind = ? ORDER BY name"

DELETE_DOCUMENT: Final = "DELETE FROM document WHERE kind = ? AND name = ?"

OBSERVE: Final = """
    INSERT INTO observation (model, batch_size, gpu_count, gpu_type, observed_at, job_id, iterations, stage_s)
    SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8 WHERE NOT EXISTS (
        SELECT 1 FROM observation
        WHERE model = ?1 AND batch_size = ?2 AND gpu_count = ?3 AND gpu_type = ?4 AND job_id = ?6 AND iterations = ?7
    )
"""
"""A report that is read twice is one observation: its job has done no iteration since."""

OBSERVATIONS_OF_KEY: Final = """
    SELECT observed_at, job_id, iterations, stage_s FROM observation
    WHERE model = ? AND batch_size = ? AND gpu_count = ? AND gpu_type = ?
    ORDER BY id
"""

DELETE_OBSERVATIONS: Final = """
    DELETE FROM observation WHERE model = ? AND batch_size = ? AND gpu_count = ? AND gpu_type = ?
"""

DELETE_OLD_OBSERVATIONS: Final = """
    DELETE FROM observation WHERE id IN (
        SELECT id FROM observation
        WHERE model = ? AND batch_size = ? AND gpu_count = ? AND gpu_type = ?
        ORDER BY id DESC LIMIT -1 OFFSET ?
    )
"""

MARK_STALE: Final = """
    INSERT INTO stale (model, batch_size, gpu_count, gpu_type, since, reason, who) VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT DO NOTHING
"""

STALE_MARKS: Final = """
    SELECT model, batch_size, gpu_count, gpu_type, since, reason, who FROM stale
    ORDER BY model, batch_size, gpu_count, gpu_type
"""

CLEAR_STALE: Final = "DELETE FROM stale WHERE model = ? AND batch_size = ? AND gpu_count = ? AND gpu_type = ?"

WRITE_AUDIT: Final = """
    INSERT INTO audit (at, who, action, model, batch_size, gpu_count, gpu_type, before, after)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

AUDIT: Final = """
    SELECT at, who, action, model, batch_size, gpu_count, gpu_type, before, after FROM audit ORDER BY id
"""

COUNT_BY_SOURCE: Final = "SELECT source, count(*) FROM measurement GROUP BY source ORDER BY source"
