-- Muri's part of cli_filter.lua: `srun` inside a member starts with the request for GPUs that its user wrote.
--
--     local muri = dofile("/usr/share/muri/cli_filter/muri.lua")
--     if muri.pre_submit(options) == "refused" then   -- in slurm_cli_pre_submit, after your own rules
--       return slurm.ERROR
--     end
--
-- To Slurm a member's job holds no GPUs, because the SPANK plugin opens those of its pilot job. Slurm would refuse each
-- step that asks for some. So the request is checked here against the member's GPUs and taken out; a share for each task
-- becomes a variable, memory for each GPU memory. Everything else, in a member and anywhere, is left as it is.
--
-- `pre_submit` never raises. It runs in the user's own srun, in Lua 5.1, which Debian's Slurm links, up to 5.4.

local M = {}

local PILOT = "MURI_PILOT" -- set by the SPANK plugin where it opens a pilot's GPUs
local STEP_GPUS = "MURI_STEP_GPUS" -- read by the SPANK plugin in the step's environment
local UNSET = { [""] = true, ["0"] = true, ["-2"] = true, unset = true } -- how `options` shows options that were not given

-- Options that Slurm takes no other way in a step without GPUs, and what to write instead. The SPANK plugin hides their
-- variables from srun.
local INSTEAD = {
  { "cpus-per-gpu", "--cpus-per-task" }, { "ntasks-per-gpu", "--ntasks" }, { "ntasks-per-tres", "--ntasks" },
}

-- What was given for an option, or nil.
local function given(options, name)
  local value = options[name]
  return not UNSET[value or ""] and value or nil
end

-- True for a part of a list that asks for GPUs: "gpu:a100:2", "gres/gpu=1", "gres:gpu".
local function is_gpu(item)
  local name = item:lower():gsub("%s", ""):gsub("^gres[:/]", "")
  return name == "gpu" or name:match("^gpu[:=]") ~= nil
end

-- A list without the parts that ask for GPUs, and these parts; nil for none.
function M.split(list)
  local rest, gpus = {}, {}
  for item in (list or ""):gmatch("[^,]+") do
    local into = is_gpu(item) and gpus or rest
    into[#into + 1] = item
  end
  return rest[1] and table.concat(rest, ","), gpus[1] and table.concat(gpus, ",")
end

-- How many GPUs a text asks for: "2", "a100:1,v100:1", "gpu:a100", "gres/gpu=2"; nil for none.
function M.count(text)
  local sum
  for item in (text or ""):gmatch("[^,]+") do
    sum = (sum or 0) + tonumber(item:match("^%s*([0-9]+)%s*$") or item:match("[:=]([0-9]+)%s*$") or 1)
  end
  return sum
end

-- GPUs that the member has on each of its nodes, or nil. Inside a step the list is still the job's.
local function held_on_node()
  local sum
  for item in (os.getenv("SLURM_JOB_GPUS") or ""):gmatch("[^,]+") do
    local first, last = item:match("^([0-9]+)%-?([0-9]*)$")
    if not first then
      return nil
    end
    sum = (sum or 0) + 1 + (last == "" and 0 or last - first)
  end
  return sum or tonumber(os.getenv("SLURM_GPUS_ON_NODE") or "")
end

-- True if this srun runs inside a member and starts a step of that member's job.
local function starts_members_step(options)
  local job = os.getenv("SLURM_JOB_ID")
  return (os.getenv(PILOT) or "") ~= "" and job ~= nil and options.type == "srun" and options.jobid == job
end

-- Nodes of the step, its tasks, and its tasks on a node, as far as its options say. Only later does srun count as tasks
-- those that are asked for by the node.
local function size_of(options)
  local nodes = tonumber((options.nodes or ""):match("^[0-9]+")) or tonumber(os.getenv("SLURM_JOB_NUM_NODES") or "")
  nodes = math.max(nodes or 1, 1)
  local tasks = math.max(tonumber(options.ntasks or "") or 1, nodes)
  return nodes, tasks, math.max(math.ceil(tasks / nodes), tonumber(given(options, "ntasks-per-node") or "") or 1)
end

-- The request for GPUs in numbers, nil where it says nothing.
local function request_of(options)
  local _, gres = M.split(given(options, "gres"))
  local _, per_task = M.split(given(options, "tres-per-task"))
  return {
    per_node = M.count(given(options, "gpus-per-node") or gres),
    per_step = M.count(given(options, "gpus")),
    per_task = M.count(given(options, "gpus-per-task") or per_task),
  }
end

-- Why the member cannot have what is asked for, or nil.
local function refusal(options, request)
  for _, pair in ipairs(INSTEAD) do
    if given(options, pair[1]) then
      return ("a step of a job that shares its GPUs cannot have --%s; write %s=N"):format(pair[1], pair[2])
    end
  end
  local held, nodes, tasks = held_on_node(), size_of(options)
  local job_nodes = math.max(nodes, tonumber(os.getenv("SLURM_JOB_NUM_NODES") or "") or 1)
  local asked = math.max(request.per_step or 0, (request.per_task or 0) * tasks, (request.per_node or 0) * nodes)
  if held and (math.max(request.per_node or 0, request.per_task or 0) > held or asked > held * job_nodes) then
    local where = job_nodes > 1 and (" on each of %d nodes"):format(job_nodes) or ""
    return ("the step asks for more GPUs than its job has, %d%s"):format(held, where)
  end
end

-- How many GPUs each task shall see by itself, or nil where all see the same ones.
local function of_each_task(options, request)
  local nodes, _, tasks_on_node = size_of(options)
  local bind = given(options, "gpu-bind") or (given(options, "tres-bind") or ""):match("gres/gpu:([^+]*)") or ""
  local bound = bind:match("per_task:([0-9]+)") or bind:match("single:(1)$")
  local share = tonumber(bound) or bind == "" and request.per_task
  if not share and nodes * tasks_on_node == 1 then
    share = request.per_node or request.per_step
  end
  local held = held_on_node()
  local fits = share and share > 0 and (not held or share * tasks_on_node <= held)
  return fits and share ~= held and share or nil
end

-- Let each task of the step find its share in its environment, whatever else its user exports. Slurm hands this option,
-- unlike requests for GPUs, on from one component of a heterogeneous step to the next.
local function export(options, share)
  local words, was = {}, options.export or "ALL"
  for word in was:gmatch("[^,]+") do
    if word:upper() ~= "NONE" and word:match("^[^=]*") ~= STEP_GPUS then
      words[#words + 1] = word
    end
  end
  if share then
    words[#words + 1] = ("%s=per-task:%d"):format(STEP_GPUS, share)
  end
  local exported = words[1] and table.concat(words, ",") or "NONE"
  if exported:upper() ~= was:upper() then
    options.export = exported
  end
end

-- Memory on each node of the step: that for a GPU, such as "700M", times its GPUs there.
local function memory(text, request)
  local nodes_gpus = request.per_node or request.per_step or request.per_task or held_on_node() or 1
  return text:gsub("^[0-9]+", function(number) return ("%d"):format(number * nodes_gpus) end):gsub("%?$", "")
end

-- Take the request out. Slurm has no other way to unset an option here than these values.
local function take_out(options, request)
  local others, gpus = M.split(given(options, "gres"))
  if gpus then
    options.gres = others or "none"
  end
  for _, name in ipairs({ "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket" }) do
    if given(options, name) then
      options[name] = "0"
    end
  end
  if given(options, "gpu-bind") or (options["tres-bind"] or ""):find("gres/gpu", 1, true) then
    options["gpu-bind"] = "none"
  end
  others, gpus = M.split(given(options, "tres-per-task"))
  if gpus then
    options["tres-per-task"] = others or ""
  end
  local per_gpu = given(options, "mem-per-gpu")
  if per_gpu then -- Slurm drops `mem` again where --mem-per-gpu stands on the command line: the step has the job's
    options["mem-per-gpu"] = "0"
    options.mem = memory(per_gpu, request)
  end
end

local function pre_submit(options)
  if not starts_members_step(options) then
    return "other"
  end
  local request = request_of(options)
  local why = refusal(options, request)
  if why then
    slurm.log_error("%s", "muri: " .. why)
    return "refused"
  end
  local share = of_each_task(options, request)
  take_out(options, request)
  export(options, share)
  return "step"
end

-- Fit a command's options to a member, if it starts a step of one. Returns "step", "refused" (the user was told why: return
-- slurm.ERROR), "other" (no member's step, nothing was changed) or "failed" (logged; Slurm decides about what is left).
function M.pre_submit(options)
  local fine, result = pcall(pre_submit, options)
  if fine then
    return result
  end
  pcall(function()
    slurm.log_info("muri: cli_filter: %s; the request is left as it is", tostring(result))
  end)
  return "failed"
end

return M
