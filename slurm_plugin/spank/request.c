#include "request.h"

#include <stdio.h>
#include <string.h>

enum { TEXT_MAX = 511 };

void muri_request_clear(struct muri_request *request)
{
	memset(request, 0, sizeof(*request));
}

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

static int contradiction(const struct muri_key *key, const struct muri_value *before, const struct muri_value *now,
			 struct muri_error *error)
{
	char first[MURI_SHOWN_SIZE], second[MURI_SHOWN_SIZE];

	muri_show_value(key, before, first);
	muri_show_value(key, now, second);
	return muri_fail(error, "%s is given twice with different values (%s and %s); keep one", key->name, first,
			 second);
}

/* Read one "key=value" or bare "key" item. */
static int parse_item(char *item, struct muri_request *into, struct muri_error *error)
{
	struct muri_value now = {0}, *before;
	char *text = strchr(item, '=');
	const struct muri_key *key;

	if (text)
		*text++ = '\0';
	key = muri_find_key(item);
	if (!key)
		return unknown_key(item, error);
	if (!text && key->type != MURI_FLAG)
		return muri_fail(error, "%s needs a value: %s", key->name, key->form);
	if (text && !*text)
		return muri_fail(error, "%s= has no value; write %s", key->name, key->form);
	if (muri_read_value(key, text ? text : "yes", &now, error))
		return -1;
	before = &into->values[key - muri_keys];
	if (before->given && !muri_same_value(before, &now))
		return contradiction(key, before, &now, error);
	*before = now;
	return 0;
}

static int parse_items(char *text, struct muri_request *into, struct muri_error *error)
{
	char *next = text;

	while (next) {
		char *item = next;

		next = strchr(item, ',');
		if (next)
			*next++ = '\0';
		if (!*item) {
			error->list_keys = true;
			return muri_fail(error, "an empty item between commas; write key=value,key=value without spaces");
		}
		if (parse_item(item, into, error))
			return -1;
	}
	return 0;
}

int muri_request_parse(const char *text, struct muri_request *into, struct muri_error *error)
{
	struct muri_request merged = *into;
	char copy[TEXT_MAX + 1];

	error->list_keys = false;
	error->text[0] = '\0';
	if (!text || !*text || muri_truth(text) == 1)
		return 0;	/* plain --muri, or --muri=1 and its like */
	if (strlen(text) > TEXT_MAX)
		return muri_fail(error, "the text is longer than %d characters", TEXT_MAX);
	snprintf(copy, sizeof(copy), "%s", text);
	if (parse_items(copy, &merged, error))
		return -1;
	*into = merged;
	return 0;
}

void muri_request_overlay(struct muri_request *base, const struct muri_request *over)
{
	for (int i = 0; i < MURI_KEY_COUNT; i++)
		if (over->values[i].given)
			base->values[i] = over->values[i];
}

static void append_item(char out[MURI_CANONICAL_SIZE], const struct muri_key *key, const struct muri_value *value)
{
	size_t used = strlen(out), room = MURI_CANONICAL_SIZE - used;
	char text[MURI_SHOWN_SIZE];

	muri_write_value(key, value, text);
	snprintf(out + used, room, "%s%s=%s", used ? "," : "", key->name, text);
}

void muri_request_canonical(const struct muri_request *request, char out[MURI_CANONICAL_SIZE])
{
	out[0] = '\0';
	for (int i = 0; i < MURI_KEY_COUNT; i++) {
		const struct muri_value *value = &request->values[i];
		bool is_no = muri_keys[i].type == MURI_FLAG && !value->number;

		if (value->given && !is_no)
			append_item(out, &muri_keys[i], value);
	}
	if (!out[0])
		snprintf(out, MURI_CANONICAL_SIZE, "on");
}

bool muri_is_canonical(const char *text)
{
	static const char alphabet[] = "abcdefghijklmnopqrstuvwxyz"
				       "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
				       "0123456789._+/=,-";
	size_t length = strlen(text);

	return length > 0 && length < MURI_CANONICAL_SIZE && strspn(text, alphabet) == length;
}
