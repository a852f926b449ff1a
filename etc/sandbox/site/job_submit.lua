-- As a site's own job_submit.lua may be: one rule, one default. Nothing of it is Muri's.
function slurm_job_submit(job, partitions, uid)
  if job.partition == "debug" and job.min_nodes ~= slurm.NO_VAL and job.min_nodes > 1 then
    slurm.log_user("site: a job in the partition debug has one node")
    return slurm.ERROR
  end
  if job.time_limit == slurm.NO_VAL then
    job.time_limit = 30
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS
