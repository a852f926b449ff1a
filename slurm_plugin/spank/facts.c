#define _GNU_SOURCE
#include "muri.h"

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Variables that decide, beside the Python, which modules a script imports. PATH counts by the Python in it. */
static const char *const deciding[] = {
	"CONDA_PREFIX",	"LD_LIBRARY_PATH",  "LD_PRELOAD",     "PYTHONHOME",  "PYTHONNOUSERSITE",
	"PYTHONPATH",	"PYTHONSAFEPATH",   "PYTHONUSERBASE", "MURI_PYTHON", "SBATCH_EXPORT",
	"VIRTUAL_ENV",
};

/* FNV-1a: it tells a user's own jobs apart and protects nothing. */
static uint64_t digest(uint64_t sum, const char *bytes, size_t size)
{
	for (size_t i = 0; i < size; i++)
		sum = (sum ^ (unsigned char)bytes[i]) * UINT64_C(0x100000001b3);
	return sum;
}

static const uint64_t EMPTY = UINT64_C(0xcbf29ce484222325);

/* With its NUL, so that words stay apart. */
static uint64_t digest_word(uint64_t sum, const char *word)
{
	return digest(sum, word, strlen(word) + 1);
}

static bool is_program(const char *path)
{
	struct stat status;

	return stat(path, &status) == 0 && S_ISREG(status.st_mode) && access(path, X_OK) == 0;
}

/*
 * Find a program as a shell does. Links of its directory are followed, but not its own: a virtual environment's Python
 * is a link out of it.
 */
static bool find_program(const char *name, char out[PATH_MAX])
{
	const char *path = getenv("PATH");
	char directory[PATH_MAX], resolved[PATH_MAX];

	while (path) {
		size_t length = strcspn(path, ":");

		if (length < sizeof(directory)) {
			snprintf(directory, sizeof(directory), "%.*s", length ? (int)length : 1, length ? path : ".");
			if (realpath(directory, resolved) &&
			    snprintf(out, PATH_MAX, "%s/%s", strcmp(resolved, "/") ? resolved : "", name) < PATH_MAX &&
			    is_program(out))
				return true;
		}
		path = path[length] ? path + length + 1 : NULL;
	}
	out[0] = '\0';
	return false;
}

static void find_python(char out[PATH_MAX])
{
	if (!find_program("python3", out))
		find_program("python", out);
}

/* --export changes what of the environment reaches the job. */
static uint64_t digest_exports(uint64_t sum, const char *words, size_t size, int script)
{
	const char *word;

	for (int i = 1; i < script && (word = muri_word(words, size, i)); i++) {
		if (strncmp(word, "--export", 8) != 0)
			continue;
		sum = digest_word(sum, word);
		if (!strchr(word, '=') && (word = muri_word(words, size, i + 1)))
			sum = digest_word(sum, word);
	}
	return sum;
}

static uint64_t digest_environment(const char *python, const char *words, size_t size, int script)
{
	uint64_t sum = digest_word(EMPTY, python);

	for (size_t i = 0; i < sizeof(deciding) / sizeof(deciding[0]); i++) {
		const char *value = getenv(deciding[i]);

		if (value)
			sum = digest_word(digest_word(sum, deciding[i]), value);
	}
	return digest_exports(sum, words, size, script);
}

/* Append base64url without padding; -1 where it does not fit. */
static int append_base64(char out[MURI_FACTS_SIZE], const char *bytes, size_t size)
{
	static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
	size_t used = strlen(out), whole = (size * 4 + 2) / 3;

	if (size > MURI_FACTS_SIZE || used + whole >= MURI_FACTS_SIZE)
		return -1;
	for (size_t i = 0; i < whole; i++) {
		size_t bit = i * 6, byte = bit / 8;
		unsigned next = byte + 1 < size ? (unsigned char)bytes[byte + 1] : 0;
		unsigned pair = (unsigned)(unsigned char)bytes[byte] << 8 | next;

		out[used + i] = alphabet[pair >> (10 - bit % 8) & 63];
	}
	out[used + whole] = '\0';
	return 0;
}

static void append(char out[MURI_FACTS_SIZE], const char *text)
{
	size_t used = strlen(out);

	snprintf(out + used, MURI_FACTS_SIZE - used, "%s", text);
}

int muri_facts(const char *words, size_t size, int script, char out[MURI_FACTS_SIZE])
{
	const char *first = muri_word(words, size, 1), *name = muri_word(words, size, script);
	const char *end = words + size, *arguments = name ? name + strlen(name) + 1 : end;
	char python[PATH_MAX];

	if (script < 1 || !size || end[-1] != '\0' || (!name && !muri_word(words, size, script - 1)))
		return -1;
	find_python(python);
	snprintf(out, MURI_FACTS_SIZE, "1.%016llx.%016llx.",
		 (unsigned long long)digest_environment(python, words, size, script),
		 (unsigned long long)digest(EMPTY, first ? first : end, first ? (size_t)(end - first) : 0));
	/* One that leaves no room for arguments is not told. */
	if (strlen(python) < MURI_FACTS_SIZE / 4)
		append_base64(out, python, strlen(python));
	append(out, ".");
	if (append_base64(out, arguments, (size_t)(end - arguments)))
		append(out, "~");
	return 0;
}
