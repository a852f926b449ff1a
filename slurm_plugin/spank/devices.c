/*
 * Opens for a task what another job's tasks can open.
 *
 * Which devices those are is asked of the kernel, not of configuration: a child enters the cgroups of both and tries to
 * make each device of /dev, which the kernel refuses where a cgroup may not open it. So the answer holds for every kind
 * of device and every way in which Slurm was told of it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "muri.h"

#define PROBE_NAME ".probe"
#define MARK "trusted.muri.devices"

enum {
	PROBE_MS = 2000,	/* it takes some milliseconds */
	DEEPEST = 4,	/* directories below /dev with devices */
	FIRST_SIZE = 16384,	/* of a file of /proc */
	LARGEST_SIZE = 16 << 20,
	MARK_SIZE = 4096,	/* a name's most on common kernels */
	RULE = 5,	/* instructions for a device */
	PROGRAM_SIZE = MURI_MOST_CLOSED * RULE + 8,
};

bool muri_act_in(int mounts, void (*act)(void *), void *context)
{
	pid_t child = fork();
	int status = -1;

	if (child == 0) {
		if (setns(mounts, CLONE_NEWNS))
			_exit(1);
		act(context);
		_exit(0);
	}
	while (child > 0 && waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			return false;
	return child > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* Add a device once. */
static bool add(struct muri_devices *devices, struct muri_device device)
{
	struct muri_device *grown;

	for (size_t i = 0; i < devices->count; i++)
		if (devices->each[i].type == device.type && devices->each[i].number == device.number)
			return true;
	grown = realloc(devices->each, (devices->count + 1) * sizeof(*grown));
	if (!grown)
		return false;
	devices->each = grown;
	grown[devices->count++] = device;
	return true;
}

void muri_devices_free(struct muri_devices *devices)
{
	free(devices->each);
	*devices = (struct muri_devices){0};
}

static int compare(const void *left, const void *right)
{
	const struct muri_device *one = left, *other = right;

	if (one->type != other->type)
		return one->type < other->type ? -1 : 1;
	if (major(one->number) != major(other->number))
		return major(one->number) < major(other->number) ? -1 : 1;
	return minor(one->number) < minor(other->number) ? -1 : minor(one->number) > minor(other->number);
}

/* Collect the devices in and below an open directory, which is closed. */
static bool collect(int directory, int depth, struct muri_devices *devices)
{
	DIR *entries = directory < 0 ? NULL : fdopendir(directory);
	bool whole = true;
	struct dirent *entry;

	if (!entries) {
		if (directory >= 0)
			close(directory);
		return directory < 0 && (errno == ENOENT || errno == ENOTDIR);	/* gone meanwhile */
	}
	while (whole && (entry = readdir(entries))) {
		struct stat facts;

		if (entry->d_name[0] == '.' && (!entry->d_name[1] || strcmp(entry->d_name, "..") == 0))
			continue;
		if (fstatat(dirfd(entries), entry->d_name, &facts, AT_SYMLINK_NOFOLLOW))
			continue;
		/* /dev/shm has as many files as users like, and their mounts, but no device. */
		if (S_ISDIR(facts.st_mode) && depth < DEEPEST && !(facts.st_mode & S_IWOTH))
			whole = collect(openat(dirfd(entries), entry->d_name,
					       O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC),
					depth + 1, devices);
		else if ((S_ISCHR(facts.st_mode) || S_ISBLK(facts.st_mode)) && facts.st_rdev)
			whole = add(devices, (struct muri_device){
						     .type = S_ISCHR(facts.st_mode) ? 'c' : 'b',
						     .number = facts.st_rdev,
					     });
	}
	closedir(entries);
	return whole;
}

bool muri_devices_below(const char *directory, struct muri_devices *devices)
{
	*devices = (struct muri_devices){0};
	if (!collect(open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC), 0, devices)) {
		muri_devices_free(devices);
		return false;
	}
	if (devices->count)
		qsort(devices->each, devices->count, sizeof(*devices->each), compare);
	return true;
}

/* Whether a directory is a job's: job_N, or from 26.05 on in version 2 its SLUID. */
static bool is_job(const char *name, size_t length, uint32_t job)
{
	char own[32];
	int size = snprintf(own, sizeof(own), "job_%lu", (unsigned long)job);

	return (length == (size_t)size && memcmp(name, own, length) == 0) || muri_is_sluid(name, length);
}

/* Where a line's cgroup path has the job's directory, above that of a step: the length of the path to its end, or 0. */
static size_t job_in(const char *path, size_t length, uint32_t job)
{
	size_t start = 0;

	for (size_t i = 0; i + strlen("/step_") <= length; i++) {
		if (path[i] != '/')
			continue;
		if (start && strncmp(path + i, "/step_", strlen("/step_")) == 0 && is_job(path + start, i - start, job))
			return i;
		start = i + 1;
	}
	return 0;
}

/* Whether `list`, such as "cpu,cpuacct", has the word. */
static bool lists(const char *list, size_t length, const char *word)
{
	size_t size = strlen(word);

	for (size_t i = 0; i + size <= length; i++)
		if (strncmp(list + i, word, size) == 0 && (i == 0 || list[i - 1] == ',') &&
		    (i + size == length || list[i + size] == ','))
			return true;
	return false;
}

bool muri_cgroup_path(const char *text, uint32_t job, struct muri_cgroup_path *found)
{
	*found = (struct muri_cgroup_path){0};
	while (text && *text) {
		const char *end = strchr(text, '\n'), *list = strchr(text, ':');
		const char *path = list ? strchr(list + 1, ':') : NULL;
		size_t length, to_job;

		if (!end || !path || path > end)
			break;
		list++;
		path++;
		length = (size_t)(end - path);
		to_job = job_in(path, length, job);
		if (to_job && length < sizeof(found->path)) {
			size_t size = (size_t)(path - 1 - list);
			bool constrains = lists(list, size, "devices");

			if (size >= sizeof(found->controllers))
				break;
			memcpy(found->path, path, length);
			found->path[length] = '\0';
			memcpy(found->controllers, list, size);
			found->controllers[size] = '\0';
			found->job_size = to_job;
			found->kind = !size ? MURI_CGROUP_V2 : constrains ? MURI_CGROUP_V1 : MURI_CGROUP_OTHER;
			if (constrains)
				return true;	/* with devices in version 1, version 2 does not constrain them */
		}
		text = end + 1;
	}
	return found->kind != MURI_CGROUP_NONE;
}

/* Undo the octal escapes of a name in mountinfo. */
static bool unescape(const char *text, size_t length, char *out, size_t size)
{
	size_t used = 0;

	for (size_t i = 0; i < length; i++) {
		char byte = text[i];

		if (byte == '\\' && i + 3 < length && text[i + 1] >= '0' && text[i + 1] <= '3') {
			byte = (char)(((text[i + 1] - '0') << 6) | ((text[i + 2] & 7) << 3) | (text[i + 3] & 7));
			i += 3;
		}
		if (used + 1 >= size)
			return false;
		out[used++] = byte;
	}
	out[used] = '\0';
	return used > 0;
}

/* Field number `index` of a line, counted from 0. */
static const char *field(const char *line, const char *end, int index, size_t *length)
{
	while (line < end) {
		const char *space = memchr(line, ' ', (size_t)(end - line));
		size_t size = (size_t)((space ? space : end) - line);

		if (index-- == 0) {
			*length = size;
			return line;
		}
		line += size + 1;
	}
	return NULL;
}

static bool is_text(const char *word, size_t length, const char *text)
{
	return word && length == strlen(text) && memcmp(word, text, length) == 0;
}

/* Whether a line of mountinfo mounts the hierarchy; its root and its place are then at `root` and `place`. */
static bool mounts(const char *line, const char *end, const struct muri_cgroup_path *path, char *root, char *place)
{
	const char *words[3], *from, *at;
	size_t sizes[3] = {0}, from_size = 0, at_size = 0;
	int dash = 6;

	from = field(line, end, 3, &from_size);
	at = field(line, end, 4, &at_size);
	/* Optional fields end with a dash; then: type, source, options. */
	for (words[0] = field(line, end, dash, &sizes[0]); words[0] && !is_text(words[0], sizes[0], "-");)
		words[0] = field(line, end, ++dash, &sizes[0]);
	for (int i = 0; i < 3; i++)
		words[i] = field(line, end, dash + 1 + i, &sizes[i]);
	if (!from || !at || !words[0])
		return false;
	if (path->kind == MURI_CGROUP_V2) {
		if (!is_text(words[0], sizes[0], "cgroup2"))
			return false;
	} else if (!is_text(words[0], sizes[0], "cgroup") || !words[2] ||
		   !lists(words[2], sizes[2],
			  path->kind == MURI_CGROUP_V1 ? "devices" : path->controllers)) {
		return false;
	}
	return unescape(from, from_size, root, MURI_CGROUP_SIZE) && unescape(at, at_size, place, MURI_CGROUP_SIZE);
}

bool muri_cgroup_mounted(const char **mounts_text, const struct muri_cgroup_path *path, char *directory, size_t size)
{
	while (*mounts_text && **mounts_text) {
		const char *line = *mounts_text, *end = strchr(line, '\n'), *below = path->path;
		char root[MURI_CGROUP_SIZE], place[MURI_CGROUP_SIZE];
		size_t length;

		if (!end)
			return false;
		*mounts_text = end + 1;
		if (!mounts(line, end, path, root, place))
			continue;
		length = strcmp(root, "/") == 0 ? 0 : strlen(root);
		if (strncmp(below, root, length) || (length && below[length] != '/'))
			continue;
		if ((size_t)snprintf(directory, size, "%s%s", place, below + length) < size)
			return true;
	}
	return false;
}

/* Read a file of /proc to its end; NULL when that cannot be done. */
static char *read_text(const char *name)
{
	FILE *file = fopen(name, "re");
	char *text = NULL, *grown;
	size_t size = 0, used = 0, part = 1;

	while (file && part) {
		if (used + 1 >= size) {
			size = size ? size * 2 : FIRST_SIZE;
			grown = size <= LARGEST_SIZE ? realloc(text, size) : NULL;
			if (!grown)
				break;
			text = grown;
		}
		part = fread(text + used, 1, size - used - 1, file);
		used += part;
	}
	if (text && (part || ferror(file))) {
		free(text);
		text = NULL;
	}
	if (text)
		text[used] = '\0';
	if (file)
		fclose(file);
	return text;
}

int muri_cgroup_find(pid_t pid, uint32_t job, struct muri_cgroup *cgroup)
{
	struct muri_cgroup_path path;
	char name[64], *text, *mounts_text = NULL;
	const char *next;
	struct stat facts;
	bool none, found = false;

	*cgroup = (struct muri_cgroup){0};
	snprintf(name, sizeof(name), "/proc/%ld/cgroup", (long)pid);
	text = read_text(name);
	none = text && !muri_cgroup_path(text, job, &path);
	if (text && !none) {
		mounts_text = read_text("/proc/self/mountinfo");
		next = mounts_text;
		while (!found && muri_cgroup_mounted(&next, &path, cgroup->leaf, sizeof(cgroup->leaf)))
			found = stat(cgroup->leaf, &facts) == 0 && S_ISDIR(facts.st_mode);
	}
	free(mounts_text);
	free(text);
	if (!found) {
		*cgroup = (struct muri_cgroup){0};
		return none ? 0 : -1;
	}
	cgroup->kind = path.kind;
	cgroup->job_size = strlen(cgroup->leaf) - (strlen(path.path) - path.job_size);
	return 1;
}

/* The program: every closed device is refused, whatever is to be done with it, and every other one allowed. */
size_t muri_device_program(const struct muri_device *closed, size_t count, struct bpf_insn *out)
{
	size_t used = 0;

	/* struct bpf_cgroup_dev_ctx: the type is in the lower half of its first word. */
	out[used++] = (struct bpf_insn){BPF_LDX | BPF_W | BPF_MEM, BPF_REG_2, BPF_REG_1, 0, 0};
	out[used++] = (struct bpf_insn){BPF_ALU | BPF_AND | BPF_K, BPF_REG_2, 0, 0, 0xffff};
	out[used++] = (struct bpf_insn){BPF_LDX | BPF_W | BPF_MEM, BPF_REG_3, BPF_REG_1, 4, 0};
	out[used++] = (struct bpf_insn){BPF_LDX | BPF_W | BPF_MEM, BPF_REG_4, BPF_REG_1, 8, 0};
	for (size_t i = 0; i < count; i++) {
		int type = closed[i].type == 'c' ? BPF_DEVCG_DEV_CHAR : BPF_DEVCG_DEV_BLOCK;
		int of_driver = (int)major(closed[i].number), own = (int)minor(closed[i].number);

		/* Another one: go on behind this rule. */
		out[used++] = (struct bpf_insn){BPF_JMP | BPF_JNE | BPF_K, BPF_REG_2, 0, 4, type};
		out[used++] = (struct bpf_insn){BPF_JMP | BPF_JNE | BPF_K, BPF_REG_3, 0, 3, of_driver};
		out[used++] = (struct bpf_insn){BPF_JMP | BPF_JNE | BPF_K, BPF_REG_4, 0, 2, own};
		out[used++] = (struct bpf_insn){BPF_ALU64 | BPF_MOV | BPF_K, BPF_REG_0, 0, 0, 0};
		out[used++] = (struct bpf_insn){BPF_JMP | BPF_EXIT, 0, 0, 0, 0};
	}
	out[used++] = (struct bpf_insn){BPF_ALU64 | BPF_MOV | BPF_K, BPF_REG_0, 0, 0, 1};
	out[used++] = (struct bpf_insn){BPF_JMP | BPF_EXIT, 0, 0, 0, 0};
	return used;
}

static int bpf(int command, union bpf_attr *attributes)
{
	return (int)syscall(SYS_bpf, command, attributes, sizeof(*attributes));
}

/* Let this program alone decide for a cgroup. */
static bool attach(int directory, const struct bpf_insn *program, size_t count)
{
	union bpf_attr load = {0}, place = {0};
	int file, failed;

	load.prog_type = BPF_PROG_TYPE_CGROUP_DEVICE;
	load.insns = (uint64_t)(uintptr_t)program;
	load.insn_cnt = (uint32_t)count;
	load.license = (uint64_t)(uintptr_t)"GPL";
	file = bpf(BPF_PROG_LOAD, &load);
	if (file < 0)
		return false;
	place.attach_type = BPF_CGROUP_DEVICE;
	place.target_fd = (uint32_t)directory;
	place.attach_bpf_fd = (uint32_t)file;
	/* Without flags, as Slurm attaches its own to a task: it takes that one's place. */
	failed = bpf(BPF_PROG_ATTACH, &place);
	close(file);
	return !failed;
}

/* Whether a cgroup has a program for devices of its own: 1, 0, or -1 when that cannot be said. */
static int has_program(const char *name)
{
	int directory = open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC), failed;
	union bpf_attr query = {0};

	if (directory < 0)
		return -1;
	query.query.target_fd = (uint32_t)directory;
	query.query.attach_type = BPF_CGROUP_DEVICE;
	failed = bpf(BPF_PROG_QUERY, &query);
	close(directory);
	return failed ? -1 : query.query.prog_cnt > 0;
}

static bool job_directory(const struct muri_cgroup *cgroup, char *out, size_t size)
{
	if (cgroup->job_size >= size)
		return false;
	memcpy(out, cgroup->leaf, cgroup->job_size);
	out[cgroup->job_size] = '\0';
	return true;
}

int muri_constrains_devices(const struct muri_cgroup *cgroup)
{
	char job[MURI_CGROUP_SIZE];

	if (cgroup->kind == MURI_CGROUP_V1)
		return 1;	/* Slurm makes this cgroup for that alone */
	if (cgroup->kind != MURI_CGROUP_V2)
		return 0;
	return job_directory(cgroup, job, sizeof(job)) ? has_program(job) : -1;
}

/* Whether a process is in a cgroup: Slurm has narrowed it by then. */
static bool is_inhabited(int directory)
{
	int file = openat(directory, "cgroup.procs", O_RDONLY | O_CLOEXEC);
	char byte;
	bool found = file >= 0 && read(file, &byte, 1) == 1;

	if (file >= 0)
		close(file);
	return found;
}

/* Call a function with each entry of a directory that starts with `prefix`, until one returns true. */
typedef bool visit_fn(int directory, void *context);

static bool visit(int parent, const char *prefix, visit_fn *function, void *context)
{
	int copy = openat(parent, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *entries = copy < 0 ? NULL : fdopendir(copy);
	struct dirent *entry;
	bool done = false;

	if (!entries) {
		if (copy >= 0)
			close(copy);
		return false;
	}
	while (!done && (entry = readdir(entries))) {
		int directory;

		if (strncmp(entry->d_name, prefix, strlen(prefix)))
			continue;
		directory = openat(parent, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (directory < 0)
			continue;
		done = function(directory, context);
		close(directory);
	}
	closedir(entries);
	return done;
}

/* Open to the task; open to the other job alone; closed to both. */
enum { PROBE_OPEN, PROBE_CLOSED, PROBE_CLOSED_TO_BOTH };

/* A child's findings, in memory that it shares with its parent. */
struct probe {
	int node;
	int leaf;	/* the task's */
	const struct muri_devices *devices;	/* to try */
	unsigned char *closed;	/* PROBE_…, for each */
	size_t least;	/* so many the other job can open of those closed to the task */
	enum muri_cgroup_kind kind;
};

/* Whether this process's cgroup may make a device: 1, 0, or -1 for another error. */
static int may_make(int node, struct muri_device device)
{
	mode_t kind = device.type == 'c' ? S_IFCHR : S_IFBLK;

	if (mknodat(node, PROBE_NAME, kind, device.number) == 0)
		return unlinkat(node, PROBE_NAME, 0) ? -1 : 1;
	return errno == EPERM ? 0 : -1;
}

static bool enter(int cgroup)
{
	return muri_write_word(cgroup, "cgroup.procs", "0");
}

/* In the child: try in a task of the other job what is closed to ours. */
static bool try_other(int leaf, void *context)
{
	struct probe *probe = context;
	size_t opened = 0;

	if (!is_inhabited(leaf) || !enter(leaf))
		return false;
	for (size_t i = 0; i < probe->devices->count; i++) {
		int made;

		if (probe->closed[i] == PROBE_OPEN)
			continue;
		made = may_make(probe->node, probe->devices->each[i]);
		if (made < 0)
			return false;
		probe->closed[i] = made ? PROBE_CLOSED : PROBE_CLOSED_TO_BOTH;
		opened += (size_t)made;
	}
	return opened >= probe->least;
}

/* A step's tasks are directly below it in version 1, below its directory "user" in version 2. */
static bool try_tasks(int directory, void *context)
{
	return visit(directory, "task_", try_other, context);
}

static bool try_step(int step, void *context)
{
	return try_tasks(step, context) || visit(step, "user", try_tasks, context);
}

/* In the child, whose end takes it out of the cgroups again. */
static bool find_out(struct probe *probe, int other_job)
{
	static const char *const steps[] = {"step_extern", "step_batch", "step_"};	/* the widest first */

	if (!enter(probe->leaf))
		return false;
	for (size_t i = 0; i < probe->devices->count; i++) {
		int made = may_make(probe->node, probe->devices->each[i]);

		if (made < 0)
			return false;
		probe->closed[i] = made ? PROBE_OPEN : PROBE_CLOSED;
	}
	for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++)
		if (visit(other_job, steps[i], try_step, probe))
			return true;
	return false;
}

/* Find out, in a child, what is closed to the task's cgroup and what of that the other job can open. */
static bool probe_both(struct probe *probe, int other_job)
{
	int status = -1, ends[2];
	struct pollfd over;
	pid_t child;

	if ((unlinkat(probe->node, PROBE_NAME, 0) && errno != ENOENT) || pipe2(ends, O_CLOEXEC))
		return false;
	child = fork();
	if (child == 0)
		_exit(find_out(probe, other_job) ? 0 : 1);
	close(ends[1]);
	over = (struct pollfd){.fd = ends[0]};
	/* In a cgroup that is frozen the child would stay for ever. */
	if (child > 0 && poll(&over, 1, PROBE_MS) <= 0)
		kill(child, SIGKILL);
	close(ends[0]);
	while (child > 0 && waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			return false;
	return child > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static int open_directory(const char *name)
{
	return open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static bool rule(int cgroup, const char *file, const char *rules)
{
	char one[64];

	while (*rules) {
		size_t length = strcspn(rules, ",");

		if (length >= sizeof(one))
			return false;
		memcpy(one, rules, length);
		one[length] = '\0';
		if (!muri_write_word(cgroup, file, one))
			return false;
		rules += length;
		rules += *rules == ',';
	}
	return true;
}

struct reopening {
	int job, step;
	bool failed;
};

static bool read_mark(int cgroup, char rules[MARK_SIZE])
{
	ssize_t length = fgetxattr(cgroup, MARK, rules, MARK_SIZE - 1);

	rules[length < 0 ? 0 : length] = '\0';
	return length > 0;
}

static bool reopen_task(int task, void *context)
{
	static const char allow[] = "devices.allow";
	struct reopening *reopening = context;
	char rules[MARK_SIZE];

	if (read_mark(task, rules) &&
	    (!rule(reopening->job, allow, rules) || !rule(reopening->step, allow, rules) || !rule(task, allow, rules)))
		reopening->failed = true;
	return false;
}

static bool reopen_step(int step, void *context)
{
	struct reopening *reopening = context;

	reopening->step = step;
	reopen_task(step, context);	/* step_extern has no tasks */
	return visit(step, "task_", reopen_task, context);
}

/* Note at a cgroup what of the devices it may open: a step that starts closes them for the whole job again. */
static bool mark(int cgroup, const struct muri_devices *devices, const bool *opened)
{
	char rules[MARK_SIZE];
	size_t used = 0;

	for (size_t i = 0; i < devices->count; i++) {
		struct muri_device device = devices->each[i];

		if (!opened[i])
			continue;
		used += (size_t)snprintf(rules + used, sizeof(rules) - used, "%s%c %u:%u rwm", used ? "," : "", device.type,
					 major(device.number), minor(device.number));
		if (used >= sizeof(rules))
			return false;
	}
	return used && fsetxattr(cgroup, MARK, rules, used, 0) == 0;
}

/* Version 1: open devices for tasks, from the job down, also what earlier ones were given. */
static bool open_v1(int job)
{
	struct reopening reopening = {.job = job};

	visit(job, "step_", reopen_step, &reopening);
	return !reopening.failed;
}

static bool open_v2(int leaf, const struct muri_devices *devices, const unsigned char *closed, const bool *opened)
{
	struct bpf_insn program[PROGRAM_SIZE];
	struct muri_device refused[MURI_MOST_CLOSED];
	size_t count = 0;

	for (size_t i = 0; i < devices->count; i++) {
		if (closed[i] == PROBE_OPEN || opened[i])
			continue;
		if (count == MURI_MOST_CLOSED)
			return false;
		refused[count++] = devices->each[i];
	}
	return attach(leaf, program, muri_device_program(refused, count, program));
}

/* Choose what is opened of that which the other job can open; whether that is the task's part alone. */
static bool choose(const struct muri_opening *opening, const struct probe *probe, bool *opened)
{
	size_t count = 0, seen = 0;
	bool narrowed;

	for (size_t i = 0; i < probe->devices->count; i++)
		count += probe->closed[i] == PROBE_CLOSED;
	narrowed = count == opening->gpus;	/* else GPUs have several files each */
	for (size_t i = 0; i < probe->devices->count; i++) {
		if (probe->closed[i] != PROBE_CLOSED)
			continue;
		opened[i] = !narrowed || (seen >= opening->part.first && seen < opening->part.first + opening->part.count);
		seen++;
	}
	return narrowed;
}

/* Whether the probe can be believed: every cgroup may open /dev/null. */
static bool makes_sense(const struct probe *probe)
{
	bool null_is_open = false;

	for (size_t i = 0; i < probe->devices->count; i++) {
		struct muri_device device = probe->devices->each[i];

		if (device.type == 'c' && device.number == makedev(1, 3))
			null_is_open = probe->closed[i] == PROBE_OPEN;
	}
	return null_is_open;
}

/* Open for a cgroup what is `opened`; with version 1 open_v1 does so. */
static bool open_for(const struct probe *probe, int cgroup, const bool *opened)
{
	return probe->kind == MURI_CGROUP_V1 ? mark(cgroup, probe->devices, opened) :
					       open_v2(cgroup, probe->devices, probe->closed, opened);
}

/* What pam_slurm_adopt puts into a job, such as a session of ssh; -1 without PrologFlags=Contain. */
static int open_extern(int job, enum muri_cgroup_kind kind)
{
	return openat(job, kind == MURI_CGROUP_V1 ? "step_extern" : "step_extern/user",
		      O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

static bool open_probed(const struct muri_opening *opening, struct probe *probe, int job, int other_job, bool *narrowed)
{
	bool *opened = calloc(probe->devices->count, sizeof(*opened));
	int adopted = open_extern(job, probe->kind);
	bool done = false;

	if (opened && probe_both(probe, other_job) && makes_sense(probe)) {
		*narrowed = choose(opening, probe, opened);
		done = open_for(probe, probe->leaf, opened);
		for (size_t i = 0; i < probe->devices->count; i++)
			opened[i] = probe->closed[i] == PROBE_CLOSED;
		if (done && adopted >= 0)
			open_for(probe, adopted, opened);	/* tasks do without it */
		done = done && (probe->kind != MURI_CGROUP_V1 || open_v1(job));
	}
	if (adopted >= 0)
		close(adopted);
	free(opened);
	return done;
}

void muri_close_adopted(const char *job_name)
{
	int job = open_directory(job_name), adopted = open_extern(job, MURI_CGROUP_V1);
	union bpf_attr place = {0};
	char rules[MARK_SIZE];

	if (adopted >= 0 && read_mark(adopted, rules))
		rule(job, "devices.deny", rules);
	if (adopted >= 0)
		close(adopted);
	adopted = open_extern(job, MURI_CGROUP_V2);
	place.attach_type = BPF_CGROUP_DEVICE;
	place.target_fd = (uint32_t)adopted;
	if (adopted >= 0) {
		bpf(BPF_PROG_DETACH, &place);	/* the job's own program decides again */
		close(adopted);
	}
	if (job >= 0)
		close(job);
}

/* Open the directory of another job beside this one. */
static int open_other(const struct muri_job *other, const char *job, char *out, size_t size)
{
	int parent = (int)(strrchr(job, '/') - job), directory;

	snprintf(out, size, "%.*s/job_%lu", parent, job, (unsigned long)other->id);
	directory = open_directory(out);
	if (directory >= 0 || !other->sluid[0])
		return directory;
	snprintf(out, size, "%.*s/%s", parent, job, other->sluid);
	return open_directory(out);
}

bool muri_open_devices(const struct muri_opening *opening, bool *narrowed)
{
	char job_name[MURI_CGROUP_SIZE], other_name[MURI_CGROUP_SIZE + MURI_SLUID_SIZE];
	struct muri_devices devices = {0};
	struct probe probe = {
		.node = opening->node,
		.devices = &devices,
		.least = opening->gpus,
		.leaf = open_directory(opening->cgroup->leaf),
		.kind = opening->cgroup->kind,
		.closed = MAP_FAILED,
	};
	int job = -1, other_job = -1;
	bool done = false;

	if (!job_directory(opening->cgroup, job_name, sizeof(job_name)))
		goto out;
	job = open_directory(job_name);
	other_job = open_other(opening->pilot, job_name, other_name, sizeof(other_name));
	if (probe.leaf < 0 || job < 0 || other_job < 0 || !muri_devices_below("/dev", &devices) || !devices.count)
		goto out;
	/* Before its program is there, the other job's cgroup can open everything. */
	if (probe.kind == MURI_CGROUP_V2 && has_program(other_name) != 1)
		goto out;
	probe.closed = mmap(NULL, devices.count, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (probe.closed != MAP_FAILED)
		done = open_probed(opening, &probe, job, other_job, narrowed);
out:
	if (probe.closed != MAP_FAILED)
		munmap(probe.closed, devices.count);
	muri_devices_free(&devices);
	if (other_job >= 0)
		close(other_job);
	if (job >= 0)
		close(job);
	if (probe.leaf >= 0)
		close(probe.leaf);
	return done;
}
