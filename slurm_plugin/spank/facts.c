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

enum { CHUNK = 4096 };

/* The rest of a file; the kernel does not say beforehand how long one of /proc is. */
static struct muri_words read_all(FILE *file)
{
	struct muri_words words = {NULL, 0};
	size_t got;

	do {
		char *larger = realloc(words.text, words.size + CHUNK);

		if (!larger)
			break;
		words.text = larger;
		got = fread(words.text + words.size, 1, CHUNK, file);
		words.size += got;
	} while (got == CHUNK);
	if (!feof(file))
		muri_words_free(&words);
	return words;
}

struct muri_words muri_command_line(void)
{
	FILE *file = fopen("/proc/self/cmdline", "re");
	struct muri_words words = {NULL, 0};

	if (file) {
		words = read_all(file);
		fclose(file);
	}
	return words;
}

void muri_words_free(struct muri_words *words)
{
	free(words->text);
	words->text = NULL;
	words->size = 0;
}

const char *muri_word(const char *text, size_t size, int index)
{
	const char *end = text + size;

	for (; index > 0 && text < end; index--)
		text += strnlen(text, (size_t)(end - text)) + 1;
	if (index != 0 || text >= end || !memchr(text, '\0', (size_t)(end - text)))
		return NULL;
	return text;
}

bool muri_says(const struct muri_words *words, int end, const char *option)
{
	const char *word = words->text;

	for (int index = 0; word && index < end; index++) {
		size_t left = words->size - (size_t)(word - words->text), length = strnlen(word, left);

		if (length == left)
			return false;
		if (length > strlen("--") && strncmp(option, word, length) == 0)
			return true;
		word += length + 1;
	}
	return false;
}

static bool is_option(const char *argument, const char *name, const char *value)
{
	size_t length;

	if (strncmp(argument, "--", 2) != 0)
		return false;
	argument += 2;
	length = strcspn(argument, "=");
	if (length == 0 || strncmp(argument, name, length) != 0)
		return false;
	if (argument[length] == '\0')
		return value == NULL;
	return value != NULL && strcmp(argument + length + 1, value) == 0;
}

bool muri_argument_is(const char *text, size_t size, int index, const char *name, const char *value)
{
	const char *argument = muri_word(text, size, index);

	return argument && is_option(argument, name, value);
}

/*
 * sbatch reads the options of the script and of the command line with the same getopt_long() and
 * does not tell a SPANK callback which of them it reads. The command line must override the script
 * as it does for every other option. Therefore this function looks at the arguments of the process:
 * while sbatch reads the command line, argument optind-1 is the current option. If the script has
 * the same option at the same index, the answer is "command line", which is also true.
 */
bool muri_on_command_line(const char *name, const char *value)
{
	struct muri_words words = muri_command_line();
	bool found = words.text && muri_argument_is(words.text, words.size, optind - 1, name, value);

	muri_words_free(&words);
	return found;
}

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
