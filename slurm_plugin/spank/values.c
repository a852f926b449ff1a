#include "values.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

enum {
	BATCH_SIZE_MAX = 1000000000,
	ACCUMULATE_MAX = 1024,
	DIGITS_MAX = 12,		/* so that even as days it fits a long long */
	MINUTE_S = 60,
	HOUR_S = 60 * MINUTE_S,
	DAY_S = 24 * HOUR_S,
	DURATION_MAX_S = 3650 * DAY_S,	/* ten years: longer is a typing error */
};

int muri_truth(const char *value)
{
	static const char *const words[][2] = {{"0", "1"}, {"no", "yes"}, {"off", "on"}, {"false", "true"}};

	for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
		for (int truth = 0; truth <= 1; truth++)
			if (strcasecmp(value, words[i][truth]) == 0)
				return truth;
	return -1;
}

/* Read decimal digits at *text and step over them; -1 if there are none or too many. */
static long long take_number(const char **text)
{
	long long number = 0;
	int digits = 0;

	for (; isdigit((unsigned char)**text); (*text)++) {
		if (++digits > DIGITS_MAX)
			return -1;
		number = number * 10 + (**text - '0');
	}
	return digits ? number : -1;
}

static long long unit_seconds(char unit)
{
	switch (unit) {
	case 's': return 1;
	case 'm': return MINUTE_S;
	case 'h': return HOUR_S;
	case 'd': return DAY_S;
	default: return 0;
	}
}

/* Read up to three numbers joined by colons; returns how many, or -1. */
static int take_fields(const char **text, long long fields[3])
{
	int count = 0;

	do {
		if (count == 3)
			return -1;
		fields[count] = take_number(text);
		if (fields[count++] < 0)
			return -1;
	} while (**text == ':' && (*text)++);
	return count;
}

/* The part after "D-" is HH[:MM[:SS]]; without days it is MM, MM:SS or HH:MM:SS. */
static long long fields_seconds(int count, const long long fields[3], bool after_days)
{
	if (after_days || count == 3)
		return fields[0] * HOUR_S + (count > 1 ? fields[1] * MINUTE_S : 0) + (count > 2 ? fields[2] : 0);
	return fields[0] * MINUTE_S + (count == 2 ? fields[1] : 0);
}

long long muri_seconds(const char *value)
{
	long long fields[3], days = 0, total;
	bool after_days = false;
	int count = take_fields(&value, fields);

	if (count < 0)
		return -1;
	if (count == 1 && *value && !value[1] && unit_seconds(*value)) {
		total = fields[0] * unit_seconds(*value);
		return total > 0 && total <= DURATION_MAX_S ? total : -1;
	}
	if (count == 1 && *value == '-') {
		value++;
		days = fields[0];
		after_days = true;
		count = take_fields(&value, fields);
	}
	if (count < 0 || *value)
		return -1;
	total = days * DAY_S + fields_seconds(count, fields, after_days);
	return total > 0 && total <= DURATION_MAX_S ? total : -1;
}

int muri_read_model(const char *value, struct muri_request *into, struct muri_error *error)
{
	static const char inner[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+/-";
	size_t length = strlen(value);

	if (length > MURI_MODEL_MAX)
		return muri_fail(error, "model: the name has %zu characters; at most %d are allowed", length,
				 MURI_MODEL_MAX);
	if (!isalnum((unsigned char)value[0]) || strspn(value, inner) != length)
		return muri_fail(error, "model=%s: a model name starts with a letter or digit, "
				 "followed by letters, digits and . _ + / -; for example model=resnet18", value);
	snprintf(into->model, sizeof(into->model), "%s", value);
	return 0;
}

int muri_read_batch_size(const char *value, struct muri_request *into, struct muri_error *error)
{
	const char *rest = value;
	long long number = take_number(&rest);

	if (*rest || number < 1 || number > BATCH_SIZE_MAX)
		return muri_fail(error, "batch-size=%.64s: not a whole number from 1 to %d; for example batch-size=64",
				 value, BATCH_SIZE_MAX);
	into->batch_size = number;
	return 0;
}

int muri_read_accumulate(const char *value, struct muri_request *into, struct muri_error *error)
{
	const char *rest = value;
	long long number = take_number(&rest);

	if (*rest || number < 1 || number > ACCUMULATE_MAX)
		return muri_fail(error, "accumulate=%.64s: not a whole number from 1 to %d; for example accumulate=8",
				 value, ACCUMULATE_MAX);
	into->accumulate = number;
	return 0;
}

int muri_read_duration(const char *value, struct muri_request *into, struct muri_error *error)
{
	long long seconds = muri_seconds(value);

	if (seconds < 0)
		return muri_fail(error, "duration=%.64s: not a time above zero and up to ten years; write minutes, MM:SS, "
				 "HH:MM:SS, D-HH[:MM[:SS]], or a whole number with s, m, h or d; "
				 "for example duration=90m", value);
	into->duration_s = seconds;
	return 0;
}

static int read_flag(const char *key, const char *value, enum muri_flag *into, struct muri_error *error)
{
	int truth = muri_truth(value);

	if (truth < 0)
		return muri_fail(error, "%s=%.64s: write %s, %s=yes or %s=no", key, value, key, key, key);
	*into = truth ? MURI_YES : MURI_NO;
	return 0;
}

int muri_read_checkpoint(const char *value, struct muri_request *into, struct muri_error *error)
{
	return read_flag("checkpoint", value, &into->checkpoint, error);
}

int muri_read_alone(const char *value, struct muri_request *into, struct muri_error *error)
{
	return read_flag("alone", value, &into->alone, error);
}
