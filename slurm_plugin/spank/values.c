#include "values.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

enum {
	DIGITS_MAX = 12,		/* so that even as days it fits a long long */
	MINUTE_S = 60,
	HOUR_S = 60 * MINUTE_S,
	DAY_S = 24 * HOUR_S,
};

int muri_fail(struct muri_error *error, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(error->text, sizeof(error->text), format, arguments);
	va_end(arguments);
	return -1;
}

int muri_truth(const char *text)
{
	static const char *const words[][2] = {{"0", "1"}, {"no", "yes"}, {"off", "on"}, {"false", "true"}};

	for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
		for (int truth = 0; truth <= 1; truth++)
			if (strcasecmp(text, words[i][truth]) == 0)
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

/* Seconds in a Slurm time or a number with a unit; -1 if malformed. */
static long long take_seconds(const char *value)
{
	long long fields[3], days = 0;
	bool after_days = false;
	int count = take_fields(&value, fields);

	if (count < 0)
		return -1;
	if (count == 1 && *value && !value[1] && unit_seconds(*value))
		return fields[0] * unit_seconds(*value);
	if (count == 1 && *value == '-') {
		value++;
		days = fields[0];
		after_days = true;
		count = take_fields(&value, fields);
	}
	if (count < 0 || *value)
		return -1;
	return days * DAY_S + fields_seconds(count, fields, after_days);
}

/* Thousandths in "0", "0.8", ".75" or "0.125"; -1 for anything else. */
static long long take_thousandths(const char *text)
{
	long long number = 0;
	int place = 1000;

	if (*text == '0' && !*++text)
		return 0;
	if (*text++ != '.' || !*text)
		return -1;
	for (; isdigit((unsigned char)*text) && place > 1; text++) {
		place /= 10;
		number += place * (*text - '0');
	}
	return *text ? -1 : number;
}

static int read_name(const struct muri_key *key, const char *text, struct muri_value *into, struct muri_error *error)
{
	static const char inner[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+/-";
	size_t length = strlen(text);

	if (length > (size_t)key->max)
		return muri_fail(error, "%s: the name has %zu characters; at most %lld are allowed", key->name, length,
				 key->max);
	if (!isalnum((unsigned char)text[0]) || strspn(text, inner) != length)
		return muri_fail(error, "%s=%s: a name starts with a letter or digit, followed by letters, digits and "
				 ". _ + / -; for example %s", key->name, text, key->example);
	snprintf(into->name, sizeof(into->name), "%s", text);
	return 0;
}

static int read_count(const struct muri_key *key, const char *text, struct muri_value *into, struct muri_error *error)
{
	const char *rest = text;

	into->number = take_number(&rest);
	if (*rest || into->number < key->min || into->number > key->max)
		return muri_fail(error, "%s=%.64s: not a whole number from %lld to %lld; for example %s", key->name,
				 text, key->min, key->max, key->example);
	return 0;
}

static int read_time(const struct muri_key *key, const char *text, struct muri_value *into, struct muri_error *error)
{
	into->number = take_seconds(text);
	if (into->number < key->min || into->number > key->max)
		return muri_fail(error, "%s=%.64s: not a time above zero and up to %lld days; write minutes, MM:SS, "
				 "HH:MM:SS, D-HH[:MM[:SS]], or a whole number with s, m, h or d; for example %s",
				 key->name, text, key->max / DAY_S, key->example);
	return 0;
}

static int read_share(const struct muri_key *key, const char *text, struct muri_value *into, struct muri_error *error)
{
	into->number = take_thousandths(text);
	if (into->number < 0)
		return muri_fail(error, "%s=%.64s: not a number from 0 to 0.999 with at most three digits after the "
				 "point; for example %s", key->name, text, key->example);
	return 0;
}

static int read_flag(const struct muri_key *key, const char *text, struct muri_value *into, struct muri_error *error)
{
	int truth = muri_truth(text);

	if (truth < 0)
		return muri_fail(error, "%s=%.64s: write %s, %s=yes or %s=no", key->name, text, key->name, key->name,
				 key->name);
	into->number = truth;
	return 0;
}

int muri_read_value(const struct muri_key *key, const char *text, struct muri_value *into, struct muri_error *error)
{
	static int (*const readers[])(const struct muri_key *, const char *, struct muri_value *,
				      struct muri_error *) = {
		[MURI_NAME] = read_name,
		[MURI_COUNT] = read_count,
		[MURI_TIME] = read_time,
		[MURI_SHARE] = read_share,
		[MURI_FLAG] = read_flag,
	};

	into->given = true;
	return readers[key->type](key, text, into, error);
}

bool muri_same_value(const struct muri_value *one, const struct muri_value *other)
{
	return one->number == other->number && strcmp(one->name, other->name) == 0;
}

/* 800 becomes "0.8". */
static void write_share(long long thousandths, char out[MURI_SHOWN_SIZE])
{
	size_t length = (size_t)snprintf(out, MURI_SHOWN_SIZE, "0.%03lld", thousandths);

	while (out[length - 1] == '0' && length > 1)
		out[--length] = '\0';
	if (out[length - 1] == '.')
		out[length - 1] = '\0';
}

void muri_write_value(const struct muri_key *key, const struct muri_value *value, char out[MURI_SHOWN_SIZE])
{
	if (key->type == MURI_NAME)
		snprintf(out, MURI_SHOWN_SIZE, "%s", value->name);
	else if (key->type == MURI_SHARE)
		write_share(value->number, out);
	else
		snprintf(out, MURI_SHOWN_SIZE, "%lld", value->number);
}

void muri_show_value(const struct muri_key *key, const struct muri_value *value, char out[MURI_SHOWN_SIZE])
{
	if (key->type == MURI_FLAG)
		snprintf(out, MURI_SHOWN_SIZE, "%s", value->number ? "yes" : "no");
	else if (key->type == MURI_TIME)
		snprintf(out, MURI_SHOWN_SIZE, "%llds", value->number);
	else
		muri_write_value(key, value, out);
}
