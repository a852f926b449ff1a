-- Muri's part of cli_filter.lua: puts it behind the site's own functions, which run first and unchanged. Commands that
-- they refuse stay refused. A line of theirs loads this file (`muri doctor` prints it).
--
-- A site without functions of its own can use this file itself as cli_filter.lua, with muri.lua beside it.

local folder = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local loaded, muri = pcall(dofile, folder .. "muri.lua")
if not loaded then
  slurm.log_info("muri: cannot load muri.lua, steps of jobs that share GPUs may not ask for any: %s", tostring(muri))
end

local site_pre_submit = slurm_cli_pre_submit

local function succeed()
  return slurm.SUCCESS
end

slurm_cli_setup_defaults = slurm_cli_setup_defaults or succeed
slurm_cli_post_submit = slurm_cli_post_submit or succeed

function slurm_cli_pre_submit(options, offset)
  local result = site_pre_submit and site_pre_submit(options, offset) or slurm.SUCCESS
  if loaded and result == slurm.SUCCESS and muri.pre_submit(options) == "refused" then
    return slurm.ERROR
  end
  return result
end

return slurm.SUCCESS
