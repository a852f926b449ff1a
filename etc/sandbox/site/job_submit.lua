-- What a site's own job_submit.lua does: one rule, one default. Muri's calls stand beside them, as
-- slurm_plugin/job_submit/job_submit.lua asks for; without Muri's files they do nothing.
package.path = "/opt/muri/job_submit/?.lua;" .. package.path
local loaded, muri = pcall(require, "muri")

function slurm_job_submit(job, partitions, uid)
  if job.partition == "debug" and job.min_nodes ~= slurm.NO_VAL and job.min_nodes > 1 then
    slurm.log_user("site: a job in the partition debug has one node")
    return slurm.ERROR
  end
  if job.time_limit == slurm.NO_VAL then
    job.time_limit = 30
  end
  if loaded then
    muri.submit(job, uid)
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  if loaded then
    muri.modify(job, uid)
  end
  return slurm.SUCCESS
end

return slurm.SUCCESS
