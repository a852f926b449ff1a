-- Muri's part of job_submit.lua: marks the jobs submitted with --muri and keeps them until Muri starts them.
--
--     local muri = require("muri")
--     muri.submit(job_desc, submit_uid)   -- in slurm_job_submit, after your own rules
--     muri.modify(job_desc, modify_uid, job_rec)   -- in slurm_job_modify, after your own rules
--
-- Both never raise, and their cost does not grow with the queue. Their only I/O is one byte into a file that is there
-- already, for a job that waits for Muri or a member that was measured. The module runs in Lua 5.1, which Debian's Slurm
-- links, up to 5.4.

local M = {}

-- What keeps a job. "licence": it asks for the licence below, which a reservation of the controller's withholds; when
-- the controller stops, the reservation ends and Slurm starts the job by itself. "hold": Muri holds it, for sites
-- that cannot add `Licenses=muri_gate:1000000` to slurm.conf; there `muri drain` must release the jobs.
M.gate = "licence"

-- Where the controller learns that a job has come: it makes this file, which only slurmctld may write, on a local file
-- system. It sees that the file was written, and reads nothing of it. nil: the controller's timer finds the job.
M.notice = "/run/muri/notice"

local GATE = "muri_gate" -- the licence and the reservation
local GATE_TAG = "muri-gate:"
local TAG = "muri:"
local USER_HOLD = "muri-hold:user"
local SCRIPT_TAG = "muri-script:" -- without a model name, the script's text tells models apart
local CALLS_NOT_TAG = "muri-calls:no" -- the batch script does not call `muri run` itself
local MEASURED_TAG = "muri-measured:"
local ESTIMATED = '"estimated":true' -- in the plan in a member's AdminComment
local FACTS_TAG = "muri-facts:" -- what the submitting process told of itself: slurm_plugin/spank/facts.h
local FACTS_LONGEST = 4096
local FINGERPRINT_BYTES = 65536 -- slurmctld waits while a script is read, so long scripts are read in part

-- The keys in the order of the canonical text; "max" of a name counts characters, of a time seconds.
-- generated from slurm_plugin/submit_option.yaml: keys
local CANONICAL_LONGEST = 180
local KEYS = {
  { name = "model", type = "name", max = 64 },
  { name = "batch-size", type = "count", min = 1, max = 1000000000 },
  { name = "duration", type = "time", min = 1, max = 315360000 },
  { name = "checkpoint", type = "flag" },
  { name = "alone", type = "flag" },
  { name = "accumulate", type = "count", min = 1, max = 1024 },
  { name = "min-speed", type = "share" },
  { name = "opportunistic", type = "flag" },
}
-- end of the generated part

local function is_number(value, key)
  return value:match("^[1-9][0-9]*$") and tonumber(value) >= key.min and tonumber(value) <= key.max
end

local IS_VALID = {
  name = function(value, key)
    return #value <= key.max and value:match("^[A-Za-z0-9][A-Za-z0-9._+/-]*$")
  end,
  count = is_number,
  time = is_number,
  share = function(value)
    return value == "0" or value:match("^0%.[0-9]?[0-9]?[1-9]$")
  end,
  flag = function(value)
    return value == "1"
  end,
}

-- Index of the key that this item gives a valid value to, or nil.
local function key_index(item)
  local name, value = item:match("^([a-z-]+)=(.+)$")
  for index, key in ipairs(KEYS) do
    if key.name == name and IS_VALID[key.type](value, key) then
      return index
    end
  end
  return nil
end

-- True for the text that the SPANK plugin writes. The client is the user's own process and could
-- send anything, so no other text may reach AdminComment.
function M.is_canonical(text)
  if text == "on" then
    return true
  end
  if text == "" or #text > CANONICAL_LONGEST or text:find(",,", 1, true) or text:match("^,") or text:match(",$") then
    return false
  end
  local last = 0
  for item in text:gmatch("[^,]+") do
    local index = key_index(item)
    if not index or index <= last then
      return false
    end
    last = index
  end
  return true
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

-- The mark that the SPANK plugin left, or nil.
function M.mark(spank_job_env)
  return left_by_plugin(spank_job_env, "MURI_JOB")
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
    if not (word:sub(1, 5) == "muri:" or word:match("^muri%-[a-z]+:")) then
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
    return "it asks for one of several licences, to which Slurm lets no other be added"
  end
  return nil
end

-- The same licences, with the gate's, if it is among them, once and with a count of 1. Slurm takes "," ";" and "|"
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

-- Keep a user's job from asking for more than one of the gate's licence. All wait while a reservation withholds it; but
-- once that ends, the one job that had asked for all would run, and everybody else's would go on waiting.
local function limit_gate(job_desc, uid)
  local licenses = job_desc.licenses
  if uid == 0 or type(licenses) ~= "string" or not licenses:find(GATE, 1, true) then
    return
  end
  local limited = M.one_gate(licenses)
  if limited ~= licenses then
    job_desc.licenses = limited
    slurm.log_user("%s", "muri: a job has one licence " .. GATE .. " at most: " .. limited)
  end
end

-- True while the controller keeps its reservation. Without it the licence is free, or slurm.conf lacks it.
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

-- The tag comes before the gate in each of these: if setting it failed afterwards, nobody would start the job.

local function keep_by_licence(job_desc, mark)
  job_desc.admin_comment = M.merge_comment(job_desc.admin_comment, tokens_of(job_desc, mark, "licence"))
  local licenses = job_desc.licenses or ""
  job_desc.licenses = M.one_gate(licenses .. (licenses == "" and "" or ",") .. GATE .. ":1")
  if job_desc.priority == 0 then
    return "muri: held by --hold; once released it waits until Muri starts it"
  end
  return "muri: waits for the licence " .. GATE .. " until Muri starts it; `muri queue` shows how it stands"
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
  return "muri: no controller is at work; submitted as an ordinary job"
end

-- Tell the controller. "r+" makes no file, and the one byte has its place already: nothing grows, on a full disk neither.
local function give_notice()
  local file = M.notice and io.open(M.notice, "r+")
  if file then
    file:write("1")
    file:close()
  end
end

local function submit(job_desc)
  local mark = M.mark(job_desc.spank_job_env)
  if not mark then
    return "unmarked"
  end
  local reason = reason_not(job_desc, mark)
  if reason then
    slurm.log_user("muri: submitted as an ordinary job: %s", reason)
    return "ordinary"
  end
  local gate = M.gate == "hold" and "hold" or lease_runs() and "licence" or "open"
  local keep = { hold = keep_by_hold, licence = keep_by_licence, open = keep_not }
  slurm.log_user("%s", keep[gate](job_desc, mark))
  return gate
end

-- What a function returns, or "failed" where it raises; that goes to the log.
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

-- Tag a job marked with --muri and keep it until Muri starts it. Returns "licence" or "hold" (what keeps it), "open"
-- (tagged, but nothing keeps it), "ordinary" (marked, but Muri does not take it), "unmarked", or "failed" (logged;
-- the job is submitted unchanged).
function M.submit(job_desc, submit_uid)
  guarded(limit_gate, job_desc, submit_uid)
  local result = guarded(submit, job_desc, submit_uid)
  if result == "licence" or result == "hold" then
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

-- Look at a change of a job. A user may take the gate's licence off a job, but not ask for more of it.
function M.modify(job_desc, modify_uid, job_rec)
  guarded(limit_gate, job_desc, modify_uid)
  local fine, told = pcall(tells_of_measurement, job_desc, job_rec)
  if fine and told then
    pcall(give_notice)
  end
end

return M
