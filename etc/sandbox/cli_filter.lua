-- The sandbox's cli_filter.lua: loads Muri's ready file from where `muri-sandbox up` copied it.
-- Without that file it changes no command.

function slurm_cli_setup_defaults(options, early)
  return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
  return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job, step)
  return slurm.SUCCESS
end

local ready = loadfile("/opt/muri/cli_filter/cli_filter.lua")
if ready then
  ready()
end

return slurm.SUCCESS
