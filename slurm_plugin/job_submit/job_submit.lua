-- Muri's part of job_submit.lua: puts it behind the site's own functions, which run first and unchanged. Jobs that they
-- refuse stay refused. A line of theirs loads this file (`muri doctor` prints it).
--
-- A site without functions of its own can use this file itself as job_submit.lua, with muri.lua beside it. slurmctld
-- reloads both only when job_submit.lua itself changes: `touch` it after replacing one of Muri's files.

local folder = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
package.path = folder .. "?.lua;" .. package.path
local loaded, muri = pcall(require, "muri")
if not loaded then
  slurm.log_info("muri: cannot load muri.lua, --muri has no effect: %s", tostring(muri))
end

local site_submit, site_modify = slurm_job_submit, slurm_job_modify

local function refused(result)
  return result ~= nil and result ~= slurm.SUCCESS
end

function slurm_job_submit(job_desc, part_list, submit_uid)
  local result = site_submit and site_submit(job_desc, part_list, submit_uid) or slurm.SUCCESS
  if loaded and not refused(result) and muri.submit(job_desc, submit_uid) == "refused" then
    return slurm.ERROR
  end
  return result
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  local result = site_modify and site_modify(job_desc, job_rec, part_list, modify_uid) or slurm.SUCCESS
  if loaded and not refused(result) then
    muri.modify(job_desc, modify_uid, job_rec)
  end
  return result
end

return slurm.SUCCESS
