{{/* What the pods of generator, learner, coordinator and autoscaler have in common. Argument of all: list of the root
context and the component. */}}

{{- define "headrace.podMeta" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
labels:
  {{- include "headrace.podLabels" . | nindent 2 }}
annotations:
  # A changed file reaches the processes by new pods.
  checksum/run: {{ $root.Values.run | sha256sum }}
  {{- with (get $root.Values $component).podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "headrace.podCommon" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
{{- $values := get $root.Values $component | default $root.Values.coordinator -}}
serviceAccountName: {{ include "headrace.fullname" $root }}{{ ternary "-autoscaler" "" (eq $component "autoscaler") }}
automountServiceAccountToken: {{ eq $component "autoscaler" }}
enableServiceLinks: false
# The pause container is process 1: it reaps orphans, and a process that is still loading dies of SIGTERM.
shareProcessNamespace: true
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $selector := deepCopy $values.nodeSelector -}}
{{- $tolerations := $values.tolerations -}}
{{- if and (eq $component "generator") $values.spot.enabled -}}
{{- $selector = merge $selector $values.spot.nodeSelector -}}
{{- $tolerations = concat $tolerations $values.spot.tolerations -}}
{{- end -}}
{{- with $selector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and (has $component (list "generator" "learner")) (eq $root.Values.device "gpu") -}}
{{- $tolerations = append $tolerations (dict "key" $values.gpuResource "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- with $tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The cluster's part of the configuration: it wins over the file, so that the file stays the laptop's. */}}
{{- define "headrace.env" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
{{- $external := $root.Values.externalRedis -}}
{{- $role := include "headrace.role" $component -}}
{{- $tls := "null" -}}
{{- if not $root.Values.valkey.enabled -}}
{{- if $external.tls.secret -}}
{{- $files := dict "ca_file" "/etc/headrace/tls/ca.crt" -}}
{{- if $external.tls.clientCertificate -}}
{{- $files = merge $files (dict "cert_file" "/etc/headrace/tls/tls.crt" "key_file" "/etc/headrace/tls/tls.key") -}}
{{- end -}}
{{- $tls = toJson $files -}}
{{- end -}}
{{- end -}}
# Values are YAML: an id like 123 stays text.
- {name: HEADRACE__RUN__ID, value: {{ include "headrace.runId" $root | toJson | quote }}}
- {name: HEADRACE__RUN__DIR, value: /runs}
- {name: HEADRACE__METRICS__HOST, value: 0.0.0.0}
- {name: HEADRACE__METRICS__PORT, value: {{ $root.Values.metrics.port | quote }}}
- {name: HEADRACE__AUTOSCALE__MIN, value: {{ $root.Values.autoscaling.min | quote }}}
- {name: HEADRACE__AUTOSCALE__MAX, value: {{ $root.Values.autoscaling.max | quote }}}
- {name: HEADRACE__BROKER__PASSWORD_FILE, value: /etc/headrace/redis/password}
- {name: HEADRACE__BROKER__TLS, value: {{ $tls | quote }}}
{{- if $root.Values.valkey.enabled }}
- {name: HEADRACE__BROKER__URL, value: "redis://{{ include "headrace.fullname" $root }}-valkey:6379/0"}
- {name: HEADRACE__BROKER__SENTINEL, value: "null"}
- {name: HEADRACE__BROKER__CLUSTER, value: "false"}
- {name: HEADRACE__BROKER__USER, value: headrace-{{ $role }}}
{{- else }}
{{- $sentinel := regexFind "^rediss?\\+sentinel://" $external.url }}
{{- if $sentinel }}
{{- $rest := trimPrefix $sentinel $external.url }}
{{- $where := dict "hosts" (splitList "," (splitList "/" $rest | first)) "service" (splitList "/" $rest | last) }}
{{- if $external.sentinelPasswordKey }}
{{- $where = merge $where (dict "password_file" "/etc/headrace/redis/sentinel-password") }}
{{- end }}
- {name: HEADRACE__BROKER__URL, value: "null"}
- {name: HEADRACE__BROKER__SENTINEL, value: {{ toJson $where | quote }}}
{{- else }}
- {name: HEADRACE__BROKER__URL, value: {{ $external.url | quote }}}
- {name: HEADRACE__BROKER__SENTINEL, value: "null"}
{{- end }}
- {name: HEADRACE__BROKER__CLUSTER, value: {{ $external.cluster | quote }}}
- {name: HEADRACE__BROKER__USER, value: {{ $external.userPerRole | ternary (printf "headrace-%s" $role) ($external.user | default "default") }}}
{{- end }}
{{- range $field, $value := $root.Values.overrides }}
- {name: HEADRACE__{{ $field | upper | replace "." "__" }}, value: {{ toJson $value | quote }}}
{{- end }}
- {name: HOME, value: /tmp}
- {name: PYTHONUNBUFFERED, value: "1"}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
- {name: HF_HUB_OFFLINE, value: {{ ternary "1" "0" $root.Values.models.offline | quote }}}
{{- if and $root.Values.models.existingClaim (not $root.Values.models.readOnly) }}
- {name: HF_HOME, value: {{ $root.Values.models.mountPath }}/hub}
{{- end }}
{{- with $root.Values.models.hubTokenSecret }}
- {name: HF_TOKEN_PATH, value: /etc/headrace/hub/token}
{{- end }}
{{- with (get $root.Values $component | default dict).extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A list of variables, YAML, each name once: the last one, which is the user's. Applying by the server refuses twins. */}}
{{- define "headrace.lastOfEach" -}}
{{- $seen := dict -}}{{- $kept := list -}}
{{- range reverse (fromYamlArray .) -}}
{{- if not (hasKey $seen .name) -}}
{{- $_ := set $seen .name true -}}
{{- $kept = prepend $kept . -}}
{{- end -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end -}}

{{- define "headrace.mounts" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
- {name: run, mountPath: /etc/headrace/run.yaml, subPath: run.yaml, readOnly: true}
- {name: redis, mountPath: /etc/headrace/redis, readOnly: true}
- {name: scratch, mountPath: /tmp}
- {name: runs, mountPath: /runs}
{{- if and (not $root.Values.valkey.enabled) $root.Values.externalRedis.tls.secret }}
- {name: tls, mountPath: /etc/headrace/tls, readOnly: true}
{{- end }}
{{- if has $component (list "generator" "learner") }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if ne $component "autoscaler" }}
{{- with $root.Values.models }}
{{- if .existingClaim }}
- {name: models, mountPath: {{ .mountPath }}, readOnly: {{ .readOnly }}}
{{- end }}
{{- if .hubTokenSecret }}
- {name: hub, mountPath: /etc/headrace/hub, readOnly: true}
{{- end }}
{{- end }}
{{- with $root.Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "headrace.volumes" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
{{- $external := not $root.Values.valkey.enabled -}}
{{- $values := get $root.Values $component | default dict -}}
- name: run
  configMap: {name: {{ include "headrace.fullname" $root }}-run}
- name: redis
  secret:
    secretName: {{ include "headrace.redisSecret" $root }}
    defaultMode: 0440
    items:
      - {key: {{ and $external (not $root.Values.externalRedis.userPerRole) | ternary "password" (include "headrace.role" $component) }}, path: password}
      {{- if and $external $root.Values.externalRedis.sentinelPasswordKey }}
      - {key: {{ $root.Values.externalRedis.sentinelPasswordKey }}, path: sentinel-password}
      {{- end }}
- name: scratch
  emptyDir: {sizeLimit: {{ $values.scratchSize | default "2Gi" }}}
{{- $shared := eq $root.Values.runs.accessMode "ReadWriteMany" }}
{{- if or (eq $component "learner") (and (eq $component "coordinator") $shared) }}
- name: runs
  persistentVolumeClaim: {claimName: {{ $root.Values.runs.existingClaim | default (printf "%s-runs" (include "headrace.fullname" $root)) }}}
{{- else }}
- name: runs
  emptyDir: {sizeLimit: 1Gi}
{{- end }}
{{- if and $external $root.Values.externalRedis.tls.secret }}
- name: tls
  secret: {secretName: {{ $root.Values.externalRedis.tls.secret }}, defaultMode: 0440}
{{- end }}
{{- if has $component (list "generator" "learner") }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $values.shmSize }}}
{{- end }}
{{- if ne $component "autoscaler" }}
{{- with $root.Values.models }}
{{- if .existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .existingClaim }}, readOnly: {{ .readOnly }}}
{{- end }}
{{- if .hubTokenSecret }}
- name: hub
  secret: {secretName: {{ .hubTokenSecret }}, defaultMode: 0440, items: [{key: token, path: token}]}
{{- end }}
{{- end }}
{{- with $root.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "headrace.container" -}}
{{- $root := index . 0 -}}
image: {{ include "headrace.image" $root }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext: {{- include "headrace.containerSecurity" . | nindent 2 }}
{{- end -}}

{{/* startup: loading; readiness: serving at an accepted version; liveness: progress. On SIGTERM every component drains by
itself, so there is no preStop hook; the grace period is what that may take. */}}
{{- define "headrace.probes" -}}
{{- $values := get (index . 0).Values (index . 1) -}}
ports:
  - {name: metrics, containerPort: {{ (index . 0).Values.metrics.port }}}
  {{- if eq (index . 1) "coordinator" }}
  - {name: store, containerPort: {{ $values.storePort }}}
  {{- end }}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ div (add ($values.startupSeconds | default 300) 9) 10 }}
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 20
  timeoutSeconds: 10
  {{- /* A learner's ranks load again in the same container whenever nodes come or go, and wait for others of them. */}}
  failureThreshold: {{ eq (index . 1) "learner" | ternary (max 6 (div ($values.startupSeconds | default 300) 20)) 6 }}
{{- end -}}

{{/* Resources with the accelerators. Argument: root context, component, number of accelerators. */}}
{{- define "headrace.resources" -}}
{{- $root := index . 0 -}}{{- $values := get $root.Values (index . 1) -}}{{- $count := index . 2 -}}
{{- $resources := deepCopy $values.resources -}}
{{- if eq $root.Values.device "gpu" -}}
{{- if $values.resourceClaim.enabled -}}
{{- $resources = merge $resources (dict "claims" (list (dict "name" "gpus"))) -}}
{{- else -}}
{{- $gpus := dict $values.gpuResource $count -}}
{{- $resources = merge $resources (dict "limits" $gpus "requests" $gpus) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "headrace.generatorGpus" -}}
{{- $run := include "headrace.run" . | fromYaml -}}
{{- $section := $run.generator | default dict -}}
{{- $gpus := .Values.generator.gpus | default (get $section "tensor_parallel_size") | default 1 -}}
{{- int $gpus -}}
{{- end -}}

{{- define "headrace.learnerRanks" -}}
{{- $run := include "headrace.run" . | fromYaml -}}
{{- $section := $run.learner | default dict -}}
{{- int (.Values.learner.ranksPerNode | default (get $section "ranks") | default 1) -}}
{{- end -}}
