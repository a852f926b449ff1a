-- Muri's part of job_submit.lua: marks the jobs submitted with --muri and keeps them until Muri starts them.
--
--     local muri = require("muri")
--     if muri.submit(job_desc, submit_uid) == "refused" then   -- in slurm_job_submit, after your own rules
--       return slurm.ERROR
--     end
--     muri.modify(job_desc, modify_uid, job_rec)   -- in slurm_job_modify, after your own rules
--
-- Both never raise, and their cost does not grow with the queue. Their only I/O is one byte into a file that is there
-- already, for a job that waits for Muri or a member that was measured. The module runs in Lua 5.1, which Debian's Slurm
-- links, up to 5.4.

local M = {}

-- What keeps a job. "license": it asks for the license below, which a reservation of the controller's withholds; when
-- the controller stops, the reservation ends and Slurm starts the job by itself. "hold": Muri holds it, for sites
-- that cannot add `Licenses=muri_gate:1000000` to slurm.conf; there `muri drain` must release the jobs.
M.gate = "license"

-- Where the controller learns that a job has come: it makes this file, which only slurmctld may write, on a local file
-- system. It sees that the file was written, and reads nothing of it. nil: the controller's timer finds the job.
M.notice = "/run/muri/notice"

local GATE = "muri_gate" -- the license and the reservation
local GATE_TAG = "muri-gate:"
local OLD_WORD = "licence" -- of the license in that tag, as Muri 0.2 spells it, which nodes may still run
local TAG = "muri:"
local USER_HOLD = "muri-hold:user"
local SCRIPT_TAG = "muri-script:" -- without a model name, the script's text tells models apart
local CALLS_NOT_TAG = "muri-calls:no" -- the batch script does not call `muri run` itself
local MEASURED_TAG = "muri-measured:"
local ESTIMATED = '"estimated":true' -- in the plan in a member's AdminComment
local FACTS_TAG = "muri-facts:" -- what the submitting process told of itself: slurm_plugin/spank/muri.h
local FACTS_LONGEST = 4096
local CARRIER = "SLURM_SPANK_MURI_JOB" -- from which the plugin sets MURI_JOB in a batch job and its steps
local FINGERPRINT_BYTES = 65536 -- slurmctld waits while a script is read, so long scripts are read in part

-- The keys of --muri in the order of the mark; "max" of a name counts characters, of a time seconds. The same keys stand in
-- slurm_plugin/records/comment_tags.py, in the help in slurm_plugin/spank/spank.c and in docs/sbatch-option.md.
M.KEYS = {
  { name = "model", form = "model=NAME", type = "name", max = 64, example = "model=resnet18",
    help = "name under which the training profile is kept" },
  { name = "batch-size", form = "batch-size=N", type = "count", min = 1, max = 1000000000, example = "batch-size=64",
    help = "samples per iteration on one GPU" },
  { name = "duration", form = "duration=TIME", type = "time", min = 1, max = 315360000, example = "duration=90m",
    help = "expected run time alone: minutes, HH:MM:SS, 90m, 2h" },
  { name = "checkpoint", form = "checkpoint", type = "flag",
    help = "the job writes checkpoints and may be stopped and resumed" },
  { name = "alone", form = "alone", type = "flag", help = "profile the job but never group it with others" },
  { name = "accumulate", form = "accumulate=N", type = "count", min = 1, max = 1024, example = "accumulate=8",
    help = "the script can split each batch into up to N parts (muri.accumulate)" },
  { name = "min-speed", form = "min-speed=X", type = "share", example = "min-speed=0.8",
    help = "least speed beside others, as a share of its speed alone" },
  { name = "opportunistic", form = "opportunistic", type = "flag", help = "the job only asks for what others leave over" },
}

local TEXTS_LONGEST = 4096 -- slurm_plugin/spank/muri.h allows less
local DIGITS_MOST = 12
local NAME_LONGEST_COMPARED, EDITS_MOST = 32, 2 -- a name with more edits than this is not a typing error
local TRUTH = {
  ["1"] = "1", yes = "1", on = "1", ["true"] = "1", ["0"] = "0", no = "0", off = "0", ["false"] = "0",
}
local UNIT_S = { s = 1, m = 60, h = 3600, d = 86400 }

local function whole(text)
  return text:match("^[0-9]+$") and #text <= DIGITS_MOST and tonumber(text) or nil
end

-- Seconds in a Slurm time or a number with a unit, or nil.
local function seconds(text)
  local number, unit = text:match("^([0-9]+)([smhd])$")
  if number then
    return whole(number) and whole(number) * UNIT_S[unit]
  end
  local days, rest = text:match("^([0-9]+)%-(.+)$")
  local fields = {}
  for field in ((rest or text) .. ":"):gmatch("([^:]*):") do
    fields[#fields + 1] = whole(field)
    if not whole(field) or #fields > 3 then
      return nil
    end
  end
  if days or #fields == 3 then
    days = whole(days or "0")
    return days and days * 86400 + fields[1] * 3600 + (fields[2] or 0) * 60 + (fields[3] or 0)
  end
  return fields[1] * 60 + (fields[2] or 0)
end

-- How the text after "key=" becomes the value of the mark, by type: that value, or nil and what is wrong.
local READ = {
  name = function(text, key)
    if #text > key.max then
      return nil, ("%s: the name has %d characters; at most %d are allowed"):format(key.name, #text, key.max)
    end
    return text:match("^[A-Za-z0-9][A-Za-z0-9._+/-]*$"),
      ("%s=%s: a name starts with a letter or digit, followed by letters, digits and . _ + / -; for example %s"):format(
        key.name, text, key.example)
  end,
  count = function(text, key)
    local number = whole(text)
    return number and number >= key.min and number <= key.max and ("%d"):format(number) or nil,
      ("%s=%s: not a whole number from %d to %d; for example %s"):format(
        key.name, text:sub(1, 64), key.min, key.max, key.example)
  end,
  time = function(text, key)
    local number = seconds(text)
    return number and number >= key.min and number <= key.max and ("%d"):format(number) or nil,
      ("%s=%s: not a time above zero and up to %d days; write minutes, MM:SS, HH:MM:SS, D-HH[:MM[:SS]], or a whole "
        .. "number with s, m, h or d; for example %s"):format(key.name, text:sub(1, 64), key.max / 86400, key.example)
  end,
  share = function(text, key)
    local digits = text == "0" and "0" or text:match("^0?%.([0-9][0-9]?[0-9]?)$")
    return digits and ("0." .. digits):gsub("0+$", ""):match("^(.-)%.?$"),
      ("%s=%s: not a number from 0 to 0.999 with at most three digits after the point; for example %s"):format(
        key.name, text:sub(1, 64), key.example)
  end,
  flag = function(text, key)
    return TRUTH[text:lower()],
      ("%s=%s: write %s, %s=yes or %s=no"):format(key.name, text:sub(1, 64), key.name, key.name, key.name)
  end,
}

-- A value as a message shows it.
local function shown(key, value)
  local words = { flag = value == "1" and "yes" or "no", time = value .. "s" }
  return words[key.type] or value
end

-- Edits that turn one word into another, counting a swap of two neighbors as one ("modle" -> "model").
local function edits(one, other)
  local cost = {}
  for i = 0, #one do
    cost[i] = { [0] = i }
    for j = 1, #other do
      local swapped = i > 1 and j > 1 and one:byte(i) == other:byte(j - 1) and one:byte(i - 1) == other:byte(j)
      cost[i][j] = i == 0 and j or math.min(
        cost[i - 1][j - 1] + (one:byte(i) == other:byte(j) and 0 or 1), cost[i - 1][j] + 1, cost[i][j - 1] + 1,
        swapped and cost[i - 2][j - 2] + 1 or math.huge)
    end
  end
  return cost[#one][#other]
end

local function unknown_key(name)
  local nearest, best = nil, EDITS_MOST + 1
  if TRUTH[name:lower()] == "0" then
    return ('"%s" is not a key; to submit without Muri write --no-muri'):format(name)
  end
  for _, key in ipairs(#name >= 2 and #name <= NAME_LONGEST_COMPARED and M.KEYS or {}) do
    -- A beginning of the key, such as "batch", is as near as can be.
    local distance = key.name:sub(1, #name) == name and 0 or edits(name, key.name)
    if distance < best then
      nearest, best = key.name, distance
    end
  end
  return ('unknown key "%s"'):format(name:sub(1, 64)) .. (nearest and ('; did you mean "%s"?'):format(nearest) or "")
end

-- Read "key=value" or a bare "key" into a table by key. Returns what is wrong, and whether the list of keys would help.
local function read_item(item, given)
  local name, text = item:match("^([^=]*)=(.*)$")
  if item == "" then
    return "an empty item between commas; write key=value,key=value without spaces", true
  end
  for _, key in ipairs(M.KEYS) do
    if key.name == (name or item) then
      if not text and key.type ~= "flag" then
        return ("%s needs a value: %s"):format(key.name, key.form)
      elseif text == "" then
        return ("%s= has no value; write %s"):format(key.name, key.form)
      end
      local value, complaint = READ[key.type](text or "yes", key)
      local before = given[key.name]
      if value and before and before ~= value then
        return ("%s is given twice with different values (%s and %s); keep one"):format(
          key.name, shown(key, before), shown(key, value))
      end
      given[key.name] = value
      return not value and complaint or nil
    end
  end
  return unknown_key(name or item), true
end

-- Read the texts that the SPANK plugin collected: "s:model=a;e:alone;c:batch-size=8", from the script, SBATCH_MURI and
-- the command line. A later place overrides an earlier one key by key; within one a contradiction is refused.
-- Returns the mark: "on", or the given keys in the order of KEYS, times in whole seconds, flags as 1 or left out. Else nil,
-- what is wrong, whether the list of keys would help, and the option with its text.
function M.parse(texts)
  local layers = { s = {}, e = {}, c = {} }
  if #texts > TEXTS_LONGEST or texts:find("[^A-Za-z0-9._+/:=,;-]") then
    texts = "?"
  end
  for entry in texts:gmatch("[^;]+") do
    local letter, text = entry:match("^([sec]):(.*)$")
    if not letter then
      return nil, "the text is not one that Muri's SPANK plugin sends", false, "--muri"
    end
    local plain = text == "" or TRUTH[text:lower()] == "1" -- --muri, or --muri=1 and its like
    for item in (plain and "" or text .. ","):gmatch("([^,]*),") do
      local complaint, listed = read_item(item, layers[letter])
      if complaint then
        return nil, complaint, listed or false, (letter == "e" and "SBATCH_MURI=" or "--muri=") .. text
      end
    end
  end
  local items = {}
  for _, key in ipairs(M.KEYS) do
    local value = layers.c[key.name] or layers.e[key.name] or layers.s[key.name]
    if value and not (key.type == "flag" and value == "0") then
      items[#items + 1] = key.name .. "=" .. value
    end
  end
  return #items > 0 and table.concat(items, ",") or "on"
end

-- True for a mark as `parse` writes it. A plugin of Muri 0.2 sends one itself, with a duration in seconds; the client is
-- the user's own process and could send anything, so no other text may reach AdminComment.
function M.is_canonical(text)
  return M.parse("c:" .. text:gsub("duration=[0-9]+", "%0s")) == text
end

-- What the SPANK plugin left under a name, or nil. Entries are "NAME=value"; Slurm counts them from 0.
local function left_by_plugin(spank_job_env, name)
  if type(spank_job_env) ~= "table" then
    return nil
  end
  local index, start = 0, name .. "="
  while spank_job_env[index] do
    if spank_job_env[index]:sub(1, #start) == start then
      return spank_job_env[index]:sub(#start + 1)
    end
    index = index + 1
  end
  return nil
end

local function is_digest(text)
  return #text == 16 and not text:find("[^0-9a-f]")
end

local function is_base64(text)
  return not text:find("[^A-Za-z0-9_-]") and #text % 4 ~= 1
end

-- The facts that the SPANK plugin left, or nil where it left none or a text that it never writes. With
-- --export=NONE and its like the environment of sbatch is not the job's, so nothing is said of that.
function M.facts(spank_job_env, environment)
  local text = left_by_plugin(spank_job_env, "MURI_FACTS")
  if not text or #text > FACTS_LONGEST then
    return nil
  end
  local surroundings, line, python, arguments = text:match("^1%.([^.]*)%.([^.]*)%.([^.]*)%.([^.]*)$")
  if not (surroundings and is_digest(surroundings) and is_digest(line) and is_base64(python)) then
    return nil
  end
  if arguments ~= "~" and not is_base64(arguments) then
    return nil
  end
  if not (environment and environment["PATH"]) then
    surroundings, python = "", ""
  end
  return table.concat({ "1", surroundings, line, python, arguments }, ".")
end

-- True for "gpu", "gpu:2", "gres:gpu:a100:2", "gres/gpu=2"; false for "gpu:0" and "gpu_memory:4".
local function is_gpu(item)
  local rest = item:gsub("%s", ""):gsub("^gres[:/]", "")
  if not (rest == "gpu" or rest:match("^gpu[:=/]")) then
    return false
  end
  local count = rest:match("[:=]([0-9]+)[A-Za-z]?$")
  return count == nil or tonumber(count) > 0
end

function M.wants_gpu(job_desc)
  -- "gres" is what 22.05 calls tres_per_node; reading both costs nothing.
  local requests = {
    job_desc.tres_per_job, job_desc.tres_per_node, job_desc.tres_per_socket, job_desc.tres_per_task, job_desc.gres,
  }
  for index = 1, 5 do
    if type(requests[index]) == "string" then
      for item in requests[index]:gmatch("[^,]+") do
        if is_gpu(item) then
          return true
        end
      end
    end
  end
  return false
end

-- The comment with Muri's tokens replaced by these and all other text kept.
function M.merge_comment(comment, tokens)
  local words = {}
  for word in (comment or ""):gmatch("%S+") do
    if not (word:sub(1, 5) == "muri:" or word:match("^muri%-[a-z-]+:")) then
      words[#words + 1] = word
    end
  end
  for _, token in ipairs(tokens) do
    words[#words + 1] = token
  end
  return table.concat(words, " ")
end

-- Why a marked job runs as an ordinary job, or nil if Muri takes it.
local function reason_not(job_desc, mark)
  if not M.is_canonical(mark) then
    return "the job's mark is malformed; do the SPANK plugin and muri.lua come from the same version of Muri?"
  end
  local offset = job_desc.het_job_offset
  if offset and slurm.NO_VAL and offset ~= slurm.NO_VAL then
    return "heterogeneous jobs are never grouped"
  end
  if not job_desc.script or job_desc.script == "" then
    return "interactive jobs start at once and are never grouped"
  end
  if not M.wants_gpu(job_desc) then
    return "it asks for no GPU; add for example --gres=gpu:1"
  end
  if job_desc.cron_job then
    return "scrontab jobs start at their set times and are never grouped"
  end
  if (job_desc.licenses or ""):find("|", 1, true) then
    return "it asks for one of several licenses, to which Slurm lets no other be added"
  end
  return nil
end

-- The same licenses, with the gate's, if it is among them, once and with a count of 1. Slurm takes "," ";" and "|"
-- between them, and ":" or "=" before a count.
function M.one_gate(licenses)
  local kept, seen = {}, false
  for item, separator in (licenses .. ","):gmatch("([^,;|]*)([,;|])") do
    local is_gate = item:match("^[^@:=*%s]*") == GATE
    if not (is_gate and seen) then
      kept[#kept + 1] = (is_gate and GATE .. ":1" or item) .. separator
    end
    seen = seen or is_gate
  end
  return table.concat(kept):sub(1, -2)
end

-- Keep a user's job from asking for more than one of the gate's license. All wait while a reservation withholds it; but
-- once that ends, the one job that had asked for all would run, and everybody else's would go on waiting.
local function limit_gate(job_desc, uid)
  local licenses = job_desc.licenses
  if uid == 0 or type(licenses) ~= "string" or not licenses:find(GATE, 1, true) then
    return
  end
  local limited = M.one_gate(licenses)
  if limited ~= licenses then
    job_desc.licenses = limited
    slurm.log_user("%s", "muri: a job has one license " .. GATE .. " at most: " .. limited)
  end
end

-- True while the controller keeps its reservation. Without it the license is free, or slurm.conf lacks it.
local function lease_runs()
  local reservation = slurm.reservations and slurm.reservations[GATE]
  return reservation ~= nil and reservation.end_time > os.time()
end

-- Sixteen hexadecimal digits that differ when the script does: two polynomial remainders. Each
-- step stays below 2^53, because Lua 5.1 computes in floating point.
function M.fingerprint(script)
  local first, second = #script % 2147483647, #script % 2147483629
  for index = 1, math.min(#script, FINGERPRINT_BYTES) do
    local byte = script:byte(index)
    first = (first * 257 + byte) % 2147483647
    second = (second * 263 + byte) % 2147483629
  end
  return string.format("%08x%08x", first, second)
end

-- Whether a batch script surely calls no `muri run` itself; one that is long may do so further down.
function M.calls_not(script)
  return #script <= FINGERPRINT_BYTES and not script:find("muri[%s%p]+run")
end

local function tokens_of(job_desc, mark, gate)
  local tokens = { TAG .. mark }
  if not mark:match("^model=") then
    tokens[2] = SCRIPT_TAG .. M.fingerprint(job_desc.script)
  end
  if M.calls_not(job_desc.script) then
    tokens[#tokens + 1] = CALLS_NOT_TAG
  end
  local facts = M.facts(job_desc.spank_job_env, job_desc.environment)
  if facts then
    tokens[#tokens + 1] = FACTS_TAG .. facts
  end
  tokens[#tokens + 1] = GATE_TAG .. gate
  return tokens
end

-- The tag comes before the gate in each of these: if setting it failed afterwards, nothing would start the job.

local function keep_by_license(job_desc, mark)
  job_desc.admin_comment = M.merge_comment(job_desc.admin_comment, tokens_of(job_desc, mark, OLD_WORD))
  local licenses = job_desc.licenses or ""
  job_desc.licenses = M.one_gate(licenses .. (licenses == "" and "" or ",") .. GATE .. ":1")
  if job_desc.priority == 0 then
    return "muri: held by --hold; once released it waits until Muri starts it"
  end
  return "muri: waits for the license " .. GATE .. " until Muri starts it; `muri queue` shows how it stands"
end

local function keep_by_hold(job_desc, mark)
  local tokens = tokens_of(job_desc, mark, "hold")
  local message = "muri: held until Muri starts it; `muri queue` shows how it stands"
  if job_desc.priority == 0 then -- sbatch --hold: only the user releases the job
    tokens[#tokens + 1] = USER_HOLD
    message = "muri: held by --hold; once released it starts as an ordinary job"
  end
  job_desc.admin_comment = M.merge_comment(job_desc.admin_comment, tokens)
  job_desc.priority = 0
  return message
end

local function keep_not(job_desc, mark)
  job_desc.admin_comment = M.merge_comment(job_desc.admin_comment, tokens_of(job_desc, mark, "open"))
  return "muri: no controller is running; submitted as an ordinary job"
end

-- Tell the controller. "r+" makes no file, and the one byte has its place already: nothing grows, on a full disk neither.
local function give_notice()
  local file = M.notice and io.open(M.notice, "r+")
  if file then
    file:write("1")
    file:close()
  end
end

-- Tell the user why the option is refused, with the list of keys where it helps.
local function refuse(option, complaint, listed)
  slurm.log_user("%s", "muri: " .. option .. ": " .. complaint)
  if listed then
    slurm.log_user("%s", "muri: valid keys of --muri=key=value,key=value are:")
    for _, key in ipairs(M.KEYS) do
      slurm.log_user("%s", ("muri:   %-14s %s"):format(key.form, key.help))
    end
  end
  return "refused"
end

local function submit(job_desc)
  local left = job_desc.spank_job_env
  local tested, texts = left_by_plugin(left, "MURI_TESTED"), left_by_plugin(left, "MURI_OPTION")
  local mark = left_by_plugin(left, "MURI_JOB") -- of a plugin of Muri 0.2
  if tested or texts then
    local complaint, listed, option
    mark, complaint, listed, option = M.parse(tested or texts)
    if complaint then
      return refuse(option, complaint, listed)
    end
  end
  if tested or not mark then
    return "unmarked"
  end
  if texts and job_desc.script and job_desc.script ~= "" and job_desc.environment then
    job_desc.environment[CARRIER] = mark
  end
  local reason = reason_not(job_desc, mark)
  if reason then
    slurm.log_user("muri: submitted as an ordinary job: %s", reason)
    return "ordinary"
  end
  local gate = M.gate == "hold" and "hold" or lease_runs() and "license" or "open"
  local keep = { hold = keep_by_hold, license = keep_by_license, open = keep_not }
  slurm.log_user("%s", keep[gate](job_desc, mark))
  return gate
end

-- The result of a function, or "failed" where it raises; that goes to the log.
local function guarded(act, job_desc, uid)
  local fine, result = pcall(act, job_desc, uid)
  if fine then
    return result
  end
  pcall(function()
    slurm.log_info("muri: job_submit: uid %s: %s; job left unchanged", tostring(uid), tostring(result))
  end)
  return "failed"
end

-- Tag a job marked with --muri and keep it until Muri starts it. Returns "license" or "hold" (what keeps it), "open"
-- (tagged, but nothing keeps it), "ordinary" (marked, but Muri does not take it), "unmarked", "failed" (logged; the job
-- is submitted unchanged), or "refused" (the option has a mistake and its user was told: do not submit the job).
function M.submit(job_desc, submit_uid)
  guarded(limit_gate, job_desc, submit_uid)
  local result = guarded(submit, job_desc, submit_uid)
  if result == "license" or result == "hold" then
    pcall(give_notice)
  end
  return result
end

-- Whether a pilot job tells, in the comment of a member whose plan rests on an estimate, that its model has been
-- measured: waiting jobs may join it now.
local function tells_of_measurement(job_desc, job_rec)
  local comment, plan = job_desc.comment, job_rec and job_rec.admin_comment
  return type(comment) == "string" and comment:find(MEASURED_TAG, 1, true) ~= nil
    and type(plan) == "string" and plan:find(ESTIMATED, 1, true) ~= nil
end

-- Look at a change of a job. A user may take the gate's license off a job, but not ask for more of it.
function M.modify(job_desc, modify_uid, job_rec)
  guarded(limit_gate, job_desc, modify_uid)
  local fine, told = pcall(tells_of_measurement, job_desc, job_rec)
  if fine and told then
    pcall(give_notice)
  end
end

return M
