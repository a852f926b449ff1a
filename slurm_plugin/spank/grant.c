/* The contents of a grant: words of Slurm's comment, numbers of GPUs, which of them a task has, and its variables. */
#include <stdio.h>
#include <string.h>

#include "muri.h"

#define GRANT_WORD "muri-grant:"
#define GATE_WORD "muri-gate:"
#define PER_TASK "per-task:"
#define SPACES " \t\n\v\f\r"

/* Step to the next word of a comment that starts with `prefix`: what follows it, with its length; NULL at the end. */
static const char *next_word(const char **comment, const char *prefix, size_t *length)
{
	size_t skipped = strlen(prefix);

	while (*comment) {
		const char *word = *comment + strspn(*comment, SPACES);
		size_t size = strcspn(word, SPACES);

		*comment = size ? word + size : NULL;
		if (size >= skipped && strncmp(word, prefix, skipped) == 0) {
			*length = size - skipped;
			return word + skipped;
		}
	}
	return NULL;
}

enum muri_granted muri_granted_pilot(const char *comment, uint32_t *pilot)
{
	enum muri_granted found = MURI_NOT_GRANTED;
	const char *word;
	size_t length;

	while ((word = next_word(&comment, GRANT_WORD, &length))) {
		char number[16];

		if (found != MURI_NOT_GRANTED || length >= sizeof(number))
			return MURI_GRANT_UNCLEAR;
		memcpy(number, word, length);
		number[length] = '\0';
		if (!muri_number(number, pilot) || *pilot == 0)
			return MURI_GRANT_UNCLEAR;
		found = MURI_GRANTED;
	}
	return found;
}

bool muri_waits_for_license(const char *comment)
{
	size_t length;
	const char *word = next_word(&comment, GATE_WORD, &length);

	return word && length == strlen("licence") &&
	       (strncmp(word, "licence", length) == 0 || strncmp(word, "license", length) == 0);
}

static bool is_digit(char byte)
{
	return byte >= '0' && byte <= '9';
}

bool muri_read_gpus(const char *text, struct muri_gpus *gpus)
{
	gpus->count = 0;
	for (;;) {
		uint32_t number = 0;

		if (!is_digit(*text) || gpus->count == MURI_MOST_GPUS)
			return false;
		while (is_digit(*text)) {
			number = number * 10 + (uint32_t)(*text++ - '0');
			if (number > MURI_LARGEST_GPU)
				return false;
		}
		for (size_t i = 0; i < gpus->count; i++)
			if (gpus->number[i] == number)
				return false;
		gpus->number[gpus->count++] = number;
		if (!*text)
			return true;
		if (*text++ != ',')
			return false;
	}
}

bool muri_per_task(const char *text, uint32_t *each)
{
	size_t skipped = strlen(PER_TASK);

	return strncmp(text, PER_TASK, skipped) == 0 && muri_number(text + skipped, each) && *each > 0;
}

bool muri_part_of_task(size_t count, uint32_t each, uint32_t task, struct muri_part *part)
{
	uint64_t first = (uint64_t)each * task;

	if (!each) {
		*part = (struct muri_part){.count = count};
		return count > 0;
	}
	if (first + each > count)
		return false;
	*part = (struct muri_part){.first = (size_t)first, .count = each};
	return true;
}

/* Append a word to a list with commas. */
static bool append(char *out, size_t size, size_t *used, const char *word, size_t length)
{
	size_t comma = *used ? 1 : 0;

	if (*used + comma + length >= size)
		return false;
	if (comma)
		out[*used] = ',';
	memcpy(out + *used + comma, word, length);
	*used += comma + length;
	out[*used] = '\0';
	return true;
}

bool muri_list_numbers(const struct muri_gpus *gpus, struct muri_part part, char *out, size_t size)
{
	size_t used = 0;

	for (size_t i = part.first; i < part.first + part.count; i++) {
		char number[32];
		int length;

		if (gpus && i >= gpus->count)
			return false;
		length = snprintf(number, sizeof(number), "%zu", gpus ? (size_t)gpus->number[i] : i);
		if (!append(out, size, &used, number, (size_t)length))
			return false;
	}
	return used > 0;
}

bool muri_list_words(const char *words, struct muri_part part, char *out, size_t size)
{
	size_t used = 0;

	for (size_t i = 0; i < part.first + part.count; i++) {
		size_t length = strcspn(words, ",");

		if (!length || (i >= part.first && !append(out, size, &used, words, length)))
			return false;
		words += length;
		words += *words == ',';
	}
	return used > 0;
}
