{{/* What the schema cannot see: fields that contradict each other. All mistakes at once. */}}
{{- define "headrace.checks" -}}
{{- $v := .Values -}}
{{- $found := list -}}
{{- $url := $v.externalRedis.url -}}
{{- if and $v.valkey.enabled $url -}}
{{- $found = append $found "valkey.enabled is true and externalRedis.url is set; set one of them: valkey.enabled=false, or no url" -}}
{{- end -}}
{{- if not (or $v.valkey.enabled $url) -}}
{{- $found = append $found "valkey.enabled is false and externalRedis.url is empty; where is the server?" -}}
{{- end -}}
{{- if and $v.externalRedis.tls.secret (not (hasPrefix "rediss" $url)) -}}
{{- $found = append $found (printf "externalRedis.tls.secret is set and externalRedis.url is %q; use rediss://, or leave the secret out" $url) -}}
{{- end -}}
{{- if and $v.externalRedis.tls.clientCertificate (not $v.externalRedis.tls.secret) -}}
{{- $found = append $found "externalRedis.tls.clientCertificate is true; name the Secret that holds it in externalRedis.tls.secret" -}}
{{- end -}}
{{- if and $v.externalRedis.cluster (contains "sentinel" $url) -}}
{{- $found = append $found "externalRedis.cluster is true and externalRedis.url names sentinels; use the URL of a node" -}}
{{- end -}}
{{- if and (contains "+sentinel://" $url) (not (regexMatch "^rediss?[+]sentinel://[^/,:]+:[0-9]+(,[^/,:]+:[0-9]+)*/[^/]+$" $url)) -}}
{{- $found = append $found (printf "externalRedis.url is %q; expected redis+sentinel://host:port[,host:port...]/service" $url) -}}
{{- end -}}
{{- if and $v.externalRedis.user $v.externalRedis.userPerRole -}}
{{- $found = append $found "externalRedis.user is set and externalRedis.userPerRole is true; one user for all needs userPerRole=false" -}}
{{- end -}}
{{- range $image := list "image" "valkey" -}}
{{- if eq (eq $image "image" | ternary $v.image.tag $v.valkey.image.tag) "latest" -}}
{{- $found = append $found (printf "%s.tag is latest: pods of one run could differ; name a version or a digest" (eq $image "image" | ternary "image" "valkey.image")) -}}
{{- end -}}
{{- end -}}
{{- $l := $v.learner -}}
{{- if or (gt (int $l.minNodes) (int $l.maxNodes)) (gt (int $l.nodes) (int $l.maxNodes)) (and (gt (int $l.nodes) 0) (lt (int $l.nodes) (int $l.minNodes))) -}}
{{- $found = append $found (printf "learner: minNodes %d, nodes %d, maxNodes %d; expected minNodes <= nodes <= maxNodes, or nodes 0 for a pause" (int $l.minNodes) (int $l.nodes) (int $l.maxNodes)) -}}
{{- end -}}
{{- if and (gt (int $l.maxNodes) 1) (ne $v.runs.accessMode "ReadWriteMany") -}}
{{- $found = append $found (printf "runs.accessMode is %s and learner.maxNodes %d: nodes share the checkpoints; use ReadWriteMany, or one node" $v.runs.accessMode (int $l.maxNodes)) -}}
{{- end -}}
{{- if and $v.autoscaling.enabled (gt (int $v.autoscaling.min) (int $v.autoscaling.max)) -}}
{{- $found = append $found (printf "autoscaling.min is %d, more than autoscaling.max, %d" (int $v.autoscaling.min) (int $v.autoscaling.max)) -}}
{{- end -}}
{{- if and $v.kueue.priorityClass (not $v.kueue.queue) -}}
{{- $found = append $found "kueue.priorityClass is set and kueue.queue is empty; name the queue" -}}
{{- end -}}
{{- if and (eq $v.device "cpu") (or $v.generator.resourceClaim.enabled $l.resourceClaim.enabled) -}}
{{- $found = append $found "device is cpu and a resourceClaim is enabled; claims are for device gpu" -}}
{{- end -}}
{{- if $found -}}
{{- fail (printf "\n- %s" (join "\n- " $found)) -}}
{{- end -}}
{{- end -}}
