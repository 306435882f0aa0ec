from typing import List

import torch
import torch.distributed as dist
import torch.nn as nn
from solo.utils.misc import concat_all_gather_no_grad
from solo.utils.sinkhorn_knopp import SinkhornKnopp


def protocpc_loss_func(
    student: torch.Tensor,
    assignments: torch.Tensor,
    prior: torch.Tensor,
    temperature: float = 0.1,
) -> torch.Tensor:
    """Computes ProtoCPC's loss given a batch of logits of the student and the prototypes that the
    teacher assigns to the same images. With a prior of ones, it is the cross-entropy.

    Args:
        student (torch.Tensor): NxK Tensor containing the cosine similarities of the student's
            features with the prototypes.
        assignments (torch.Tensor): NxK Tensor containing the assignments of the teacher.
        prior (torch.Tensor): K Tensor that says how common each prototype is, with a mean of 1.
        temperature (float, optional): temperature of the student. Defaults to 0.1.

    Returns:
        torch.Tensor: ProtoCPC loss.
    """

    logits = student.float() / temperature
    align = -torch.sum(assignments * logits, dim=1)
    unif = torch.logsumexp(logits + torch.log(prior.clamp(min=1e-8)), dim=1)
    return (align + unif).mean()


class ProtoCPCLoss(nn.Module):
    def __init__(
        self,
        num_prototypes: int,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.04,
        prior_momentum: float = 0.9,
        sk_iters: int = 3,
    ):
        """ProtoCPC's loss with the assignments of the teacher and the prior of the prototypes.

        Args:
            num_prototypes (int): number of prototypes.
            student_temperature (float, optional): temperature of the student. Defaults to 0.1.
            teacher_temperature (float, optional): temperature of the teacher, the entropy
                regularization of sinkhorn-knopp. Defaults to 0.04.
            prior_momentum (float, optional): momentum of the prior. Defaults to 0.9.
            sk_iters (int, optional): number of iterations of sinkhorn-knopp. Defaults to 3.
        """

        super().__init__()

        self.student_temperature = student_temperature
        self.prior_momentum = prior_momentum
        self.sk = SinkhornKnopp(sk_iters, teacher_temperature)
        self.register_buffer("prior", torch.ones(num_prototypes))

    @torch.no_grad()
    def get_assignments(self, teacher: List[torch.Tensor]) -> List[torch.Tensor]:
        """Computes the assignments of each view with sinkhorn-knopp.

        Args:
            teacher (List[torch.Tensor]): NxK Tensor of each view containing the cosine similarities
                of the teacher's features with the prototypes.

        Returns:
            List[torch.Tensor]: NxK Tensor of each view containing the assignments.
        """

        if dist.is_available() and dist.is_initialized():
            self.sk.world_size = dist.get_world_size()
        return [self.sk(logits.float()) for logits in teacher]

    @torch.no_grad()
    def update_prior(self, assignments: List[torch.Tensor]):
        """Updates the prior of the prototypes with the batch of all processes.

        Args:
            assignments (List[torch.Tensor]): NxK Tensor of each view containing the assignments.
        """

        mean = torch.cat(assignments).mean(dim=0, keepdim=True)
        mean = concat_all_gather_no_grad(mean).mean(dim=0)
        m = self.prior_momentum
        self.prior = m * self.prior + (1 - m) * len(self.prior) * mean

    def forward(
        self, student: List[torch.Tensor], teacher: List[torch.Tensor], same_view: bool = False
    ) -> torch.Tensor:
        """Updates the prior and computes the loss over all pairs of views.

        Args:
            student (List[torch.Tensor]): NxK Tensor of each view containing the cosine similarities
                of the student's features with the prototypes.
            teacher (List[torch.Tensor]): the same of the teacher's features.
            same_view (bool, optional): whether student and teacher are compared on the same view
                instead of on different views. Defaults to False.

        Returns:
            torch.Tensor: ProtoCPC loss.
        """

        assignments = self.get_assignments(teacher)
        self.update_prior(assignments)

        losses = []
        for v1, a in enumerate(assignments):
            for v2, logits in enumerate(student):
                if (v1 == v2) == same_view:
                    loss = protocpc_loss_func(logits, a, self.prior, self.student_temperature)
                    losses.append(loss)
        return sum(losses) / len(losses)
