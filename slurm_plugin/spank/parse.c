#include "parse.h"

#include <stdio.h>
#include <string.h>

#include "keys.h"
#include "values.h"

enum { TEXT_MAX = 512 };

static int unknown_key(const char *name, struct muri_error *error)
{
	const char *nearest = muri_nearest_key(name);

	error->list_keys = true;
	if (muri_truth(name) == 0)
		return muri_fail(error, "\"%.64s\" is not a key; to submit without Muri write --no-muri", name);
	if (nearest)
		return muri_fail(error, "unknown key \"%.64s\"; did you mean \"%s\"?", name, nearest);
	return muri_fail(error, "unknown key \"%.64s\"", name);
}

static int contradiction(const char *key, const char *before, const char *now, struct muri_error *error)
{
	return muri_fail(error, "%s is given twice with different values (%s and %s); keep one", key, before, now);
}

static const char *yes_no(enum muri_flag flag)
{
	return flag == MURI_YES ? "yes" : "no";
}

static int number_clash(const char *key, long long before, long long now, const char *unit, struct muri_error *error)
{
	char first[32], second[32];

	if (!before || !now || before == now)
		return 0;
	snprintf(first, sizeof(first), "%lld%s", before, unit);
	snprintf(second, sizeof(second), "%lld%s", now, unit);
	return contradiction(key, first, second, error);
}

static int flag_clash(const char *key, enum muri_flag before, enum muri_flag now, struct muri_error *error)
{
	if (before == MURI_UNSET || now == MURI_UNSET || before == now)
		return 0;
	return contradiction(key, yes_no(before), yes_no(now), error);
}

static int check_clash(const struct muri_request *before, const struct muri_request *now, struct muri_error *error)
{
	if (before->model[0] && now->model[0] && strcmp(before->model, now->model) != 0)
		return contradiction("model", before->model, now->model, error);
	if (number_clash("batch-size", before->batch_size, now->batch_size, "", error) ||
	    number_clash("duration", before->duration_s, now->duration_s, "s", error) ||
	    flag_clash("checkpoint", before->checkpoint, now->checkpoint, error) ||
	    flag_clash("alone", before->alone, now->alone, error) ||
	    number_clash("accumulate", before->accumulate, now->accumulate, "", error))
		return -1;
	return 0;
}

/* Read one "key=value" or bare "key" item. */
static int parse_item(char *item, struct muri_request *into, struct muri_error *error)
{
	char *value = strchr(item, '=');
	const struct muri_key *key;

	if (value)
		*value++ = '\0';
	key = muri_find_key(item);
	if (!key)
		return unknown_key(item, error);
	if (!value && !key->value_optional)
		return muri_fail(error, "%s needs a value: %s", key->name, key->form);
	if (value && !*value)
		return muri_fail(error, "%s= has no value; write %s", key->name, key->form);
	return key->read(value ? value : "yes", into, error);
}

static int parse_items(char *text, struct muri_request *into, struct muri_error *error)
{
	char *next = text;

	while (next) {
		struct muri_request one;
		char *item = next;

		next = strchr(item, ',');
		if (next)
			*next++ = '\0';
		muri_request_clear(&one);
		if (!*item) {
			error->list_keys = true;
			return muri_fail(error, "an empty item between commas; write key=value,key=value without spaces");
		}
		if (parse_item(item, &one, error) || check_clash(into, &one, error))
			return -1;
		muri_request_overlay(into, &one);
	}
	return 0;
}

int muri_parse(const char *text, struct muri_request *into, struct muri_error *error)
{
	struct muri_request merged = *into;
	char copy[TEXT_MAX];

	error->list_keys = false;
	error->text[0] = '\0';
	if (!text || !*text || muri_truth(text) == 1)
		return 0;	/* plain --muri, or --muri=1 and its like */
	if (strlen(text) >= sizeof(copy))
		return muri_fail(error, "the text is longer than %d characters", TEXT_MAX - 1);
	snprintf(copy, sizeof(copy), "%s", text);
	if (parse_items(copy, &merged, error))
		return -1;
	*into = merged;
	return 0;
}
