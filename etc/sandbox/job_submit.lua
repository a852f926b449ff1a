-- The sandbox's job_submit.lua: loads Muri's ready file from where `muri-sandbox up` copied it.
-- Without that file it changes no job.
package.path = "/opt/muri/job_submit/?.lua;" .. package.path

function slurm_job_submit(job, partitions, uid)
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end

local ready = loadfile("/opt/muri/job_submit/job_submit.lua")
if ready then
  ready()
end

return slurm.SUCCESS
