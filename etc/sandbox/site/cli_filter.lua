-- As a site's own cli_filter.lua may be: one rule. Nothing of it is Muri's.
function slurm_cli_setup_defaults(options, early)
  return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
  if options.type == "srun" and options["job-name"] == "forbidden" then
    slurm.log_error("site: no step has this name")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job, step)
  return slurm.SUCCESS
end

return slurm.SUCCESS
