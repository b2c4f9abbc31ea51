/** What the studio's page says beside the report's words, in English and Chinese. {0}, {1} …: what `fill` puts there. */
export const STUDIO_WORDS = {
  tools: ["What to change", "可更改项"],
  hideTools: ["Hide the tools", "收起工具"],
  showTools: ["Show the tools", "展开工具"],
  undo: ["Undo", "撤销"],
  redo: ["Redo", "重做"],
  nothingToUndo: ["nothing to take back", "没有可撤销的操作"],
  nothingToRedo: ["nothing to do again", "没有可重做的操作"],
  boundUnknown: ["bound unknown", "下界未知"],
  boundGap: ["not shown to be the best", "未证明最优"],
  boundStrategy: ["bound of its strategy alone", "仅有同一策略内的下界"],
  boundProven: ["proven", "已证明"],
  ofStrategy: ["of its strategy", "同一策略内"],
  ofSpace: ["of the space", "整个空间内"],
  tabLayers: ["Layers", "层"],
  tabModes: ["Modes", "层模式"],
  tabStrategy: ["Strategy", "策略"],
  tabWhatIf: ["What if", "假设"],
  tabSearch: ["Search", "搜索"],
  tabPins: ["Pins", "固定方案"],
  tabJob: ["New job", "新任务"],
  tabFiles: ["Files", "文件"],
  layersHelp: [
    "Drag the line between two stages, or focus it and press an arrow key: each press moves one layer.",
    "拖动两个阶段之间的分界线；或选中分界线后按方向键，每按一次移动一层。",
  ],
  layersOf: ["Layers of {0}", "{0} 的层"],
  boundary: ["{0} layers: boundary of {1} and {2}", "{0} 的层：{1}与{2}的分界"],
  boundaryCounts: ["{0}: {1}; {2}: {3}", "{0}：{1} 层；{2}：{3} 层"],
  stageNumber: ["stage {0}", "阶段 {0}"],
  stageOfChunk: ["stage {0} of chunk {1}", "块 {1} 的阶段 {0}"],
  oneTo: ["One layer to {0}", "移一层到{0}"],
  modesHelp: ["How many layers of a stage run in each mode.", "每个阶段有多少层使用该模式。"],
  noModes: ["The layers of this job have no other modes.", "此任务的层没有其他模式。"],
  modeOfStage: ["{0}: {1}", "{0}：{1}"],
  strategyHelp: [
    "Another size takes the nearest strategy of the job's space that has it.",
    "更改大小后，采用任务空间中最接近的合法策略。",
  ],
  whatIfHelp: ["The same plan with another figure in the job.", "任务改用其他数值时的同一方案。"],
  given: ["in the file: {0}", "文件中：{0}"],
  reset: ["Reset", "还原"],
  resetAll: ["Reset all", "全部还原"],
  tokens: ["tokens", "个 token"],
  samples: ["samples", "个样本"],
  optimise: ["Optimise from here", "从当前方案优化"],
  scope: ["Over", "范围"],
  scopeStrategy: ["layers of this strategy", "当前策略的层划分"],
  scopeSpace: ["the whole space", "整个空间"],
  limitSeconds: ["At most, seconds", "时限（秒）"],
  start: ["Start", "开始"],
  cancel: ["Cancel", "取消"],
  bestSoFar: ["best so far", "目前最优"],
  ofSeconds: ["{0} s of {1} s", "{0} 秒，共 {1} 秒"],
  whyNot: ["Why not another plan", "为何不是别的方案"],
  wish: ["Sizes, such as PP=8,TP=4", "大小，如 PP=8,TP=4"],
  any: ["any", "任意"],
  ask: ["Ask", "提问"],
  answers: ["Answers", "回答"],
  best: ["best step of such plans", "此类方案的最短单步时间"],
  pinName: ["Name", "名称"],
  pin: ["Pin", "固定"],
  pinsHelp: ["A pinned plan is shown beside the one that you change.", "固定的方案与正在更改的方案并排显示。"],
  noPins: ["Nothing is pinned.", "没有固定的方案。"],
  take: ["Go on from it", "从此继续"],
  unpin: ["Unpin", "取消固定"],
  difference: ["Now against it", "当前方案与其相比"],
  jobHelp: [
    "A model, devices and a workload make a job; what is left out is as `mm-autoparallel init` takes it.",
    "模型、设备与负载构成任务；未填的项与 `mm-autoparallel init` 的默认一致。",
  ],
  model: ["Model", "模型"],
  models: ["Catalog", "目录"],
  configs: ["Files of the folder", "文件夹中的文件"],
  devicesPerNode: ["Devices of a node", "每节点设备数"],
  makeJob: ["Make the job", "创建任务"],
  commands: ["The same on the command line", "等价的命令行"],
  saveFiles: ["Files to save", "可保存的文件"],
  noSpaceYet: [
    "No space has been searched yet: “Optimise from here” over the whole space does.",
    "尚未搜索空间：对整个空间执行“从当前方案优化”。",
  ],
  workOutSources: ["Show what the step and the plans' order hang on", "显示单步时间与方案顺序的决定因素"],
  waiting: ["Waiting for the new figures.", "正在计算。"],
  loading: ["Waiting for the studio's server.", "正在等待服务器。"],
  otherPage: [
    "Another page changed the plan first. This is how it stands now; the last change was not made.",
    "另一页面先更改了方案。此处为其现状；刚才的更改未执行。",
  ],
  gone: [
    "The studio's server does not answer. This page keeps trying, and goes on when it is back.",
    "服务器没有响应。本页会继续尝试，恢复后继续。",
  ],
  goneWhile: [
    "The server stopped answering before it confirmed the last change; what is drawn is how the plan stands.",
    "服务器在确认上次更改之前停止响应；图中为方案现状。",
  ],
  token: [
    "This page has no valid token. Open the address that the terminal printed when the studio was started.",
    "本页没有有效的令牌。请打开启动 studio 时终端打印的地址。",
  ],
  refused: ["The server refused: {0}", "服务器拒绝：{0}"],
  // modes of a layer
  "mode recompute": ["recompute", "重计算"],
  "mode selective": ["selective recompute", "选择性重计算"],
  "mode activation": ["activation function recomputed", "激活函数重计算"],
  "mode offload": ["offload", "卸载到主机"],
  "mode recompute_offload": ["recompute, input offloaded", "重计算，输入卸载到主机"],

  // knobs of the job, by their key
  "cluster.num_nodes": ["Nodes", "节点数"],
  "cluster.device": ["Device", "设备"],
  "cluster.device.memory_bytes": ["Memory of a device", "设备显存"],
  "cluster.device.node_link.bandwidth_bytes_per_s": ["Link inside a node", "节点内链路"],
  "cluster.device.network_link.bandwidth_bytes_per_s": ["Link between nodes", "节点间链路"],
  "workload.global_batch_size": ["Samples a step", "每步样本数"],
  "workload.seq_length": ["Tokens of a sample", "每样本 token 数"],
  "workload.image_tokens_per_sample": ["Image tokens of a sample", "每样本图像 token 数"],
  "workload.images_per_sample": ["Images of a sample", "每样本图像数"],

  // files to save, by their name
  "plan.json": ["the plan, as `plan` writes it", "方案，与 `plan` 写出的相同"],
  "job.yaml": ["the job, with what was changed", "任务，含所做更改"],
  "report.html": ["this page as one file", "本页的单个文件版"],
  "timeline.svg": ["the timeline as a picture", "时间线图片"],
  "trace.json": ["the timeline for Perfetto", "供 Perfetto 打开的时间线"],
} as const;

/** `text` with `parts` in the place of {0}, {1} … */
export function fill(text: string, ...parts: (string | number)[]): string {
  return text.replace(/\{(\d)\}/g, (_, place) => String(parts[Number(place)]));
}

/** What the page calls `key`; `title`, what the program calls it, where the page has no word for it. */
export function saidOf(key: string, title: string, words: (word: string) => string): string {
  const said = words(key);
  return said === key ? title : said;
}
